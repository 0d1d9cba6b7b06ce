"""Construction of a small Hugging Face model folder: random weights and a char-level tokenizer."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import hf_config_dict, parameter_shapes, stored_forms
from spmdrl.engines.models.hf.model_weights import VALUE_HEAD, write_weights
from spmdrl.engines.models.hf.stored_forms import USUAL_FORMS
from spmdrl.engines.models.rope_scaling import ProportionalScaling
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.model_config import PRINTABLE_CHARS, MakeConfig

_EMBEDDING_STD = 0.02
_HYBRIDS = ("qwen3_5", "qwen3_next")
_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
_SPECIAL_IDS = {f"{token[1:-1]}_token_id": number for number, token in enumerate(_SPECIAL_TOKENS[:3])}


def decoder_config(make: MakeConfig) -> DecoderConfig:
    """Return the decoder of these sizes; its vocabulary is the special tokens and then the characters."""
    latent, moe, family = make.latent, make.moe, make.model_type
    is_gemma, is_gemma4 = family.startswith("gemma"), family == "gemma4_text"
    is_oss, is_hybrid = family == "gpt_oss", family.startswith(_HYBRIDS)
    # Their config.json has no width of dense layers.
    lacks_dense = moe is not None and family in ("gpt_oss", "qwen3_5_moe_text")
    return DecoderConfig(
        model_type=family,
        vocab_size=len(_SPECIAL_TOKENS) + len(make.chars),
        hidden_size=make.hidden_size,
        intermediate_size=moe.intermediate_size if moe is not None and lacks_dense else make.intermediate_size,
        num_layers=make.num_hidden_layers,
        num_heads=make.num_attention_heads,
        num_kv_heads=make.num_key_value_heads if latent is None else make.num_attention_heads,
        head_size=make.head_size if latent is None else latent.head_size,
        rms_eps=1e-6,
        rope_theta=10000.0,
        qk_norm=latent is None and not is_oss,
        attention_bias=is_oss,
        tied_head=make.tie_word_embeddings,
        max_positions=make.max_position_embeddings,
        rope_scaling=ProportionalScaling(0.25) if is_gemma4 else None,
        moe=moe,
        latent=latent,
        delta=make.delta,
        rotary_size=_rotary_size(make),
        window=make.window,
        full=make.full,
        attention_sinks=is_oss,
        attention_scale=1.0 if is_gemma4 else make.head_size**-0.5 if is_gemma else None,
        attention_gate=is_hybrid,
        v_norm=is_gemma4,
        norm_offset=0.0 if is_gemma4 else 1.0 if is_hybrid or is_gemma else None,
        output_norms=is_gemma,
        scales_layers=is_gemma4,
        scales_embedding=is_gemma,
        gelu=is_gemma,
        logit_softcap=30.0 if is_gemma4 else None,
    )


def _rotary_size(make: MakeConfig) -> int | None:
    """Return the rotated dims of each head, an even number; None: all."""
    if make.model_type == "glm4_moe":
        return max(2, make.head_size // 4 * 2)
    if make.model_type.startswith(_HYBRIDS):
        return max(2, make.head_size // 8 * 2)
    return None


class RandomWeights:
    """Initial float32 weights, each a function of the seed and its name alone, so that every rank makes the same.

    Matrices are normal with variance 1 / fan-in, those that write to the residual stream smaller by the square root
    of their number (GPT-2's rule); embeddings and heads deviate by 0.02; norms are 1 and biases and sinks 0.
    Each expert has a name of its own, as in most families' files.
    """

    def __init__(self, config: DecoderConfig, seed: int):
        self._shapes = parameter_shapes(config)
        self._num_residual_writes = 2 * config.num_layers
        self._norm = 1.0 - (config.norm_offset or 0.0)
        self._seed = seed

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def __call__(self, name: str) -> Tensor:
        return self.read(whole_slice(name, self._shapes[name]))

    def read(self, wanted: WeightSlice) -> Tensor:
        """Read one slice, like `WeightFiles.read`; only the needed experts of a stack are made."""
        shape, rule = self._shapes[wanted.name], USUAL_FORMS.rule_of(wanted.name)
        if rule is None:
            return self._whole(wanted.name, shape)[wanted.index_within(whole_slice(wanted.name, shape))].clone()
        stacked = torch.empty(wanted.shape)
        for out, box in zip(stacked, rule.boxes(wanted), strict=False):
            whole = whole_slice(box.name, shape[1:])
            out.copy_(self._whole(box.name, whole.shape)[box.index_within(whole)])
        return stacked

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(("linear_attn.norm.weight", "layer_scalar")):
            return torch.ones(shape)
        if name.endswith(("dt_bias", "A_log")):
            # Decays of a token between exp(-16 softplus(1)) and nearly 1, as transformers begins.
            return torch.ones(shape) if name.endswith("dt_bias") else torch.linspace(1, 16, *shape).log()
        if name.endswith("norm.weight"):
            return torch.full(shape, self._norm)
        if name.endswith(("bias", "sinks")):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        return torch.randn(shape, generator=generator) * self._deviation(name, fan_in=shape[-1])

    def _deviation(self, name: str, *, fan_in: int) -> float:
        if name.endswith(("embed_tokens.weight", "lm_head.weight", VALUE_HEAD)):
            return _EMBEDDING_STD
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            return 1.0 / math.sqrt(fan_in * self._num_residual_writes)
        return 1.0 / math.sqrt(fan_in)


def make_char_tokenizer(folder: str | Path, chars: str = PRINTABLE_CHARS) -> None:
    """Write a tokenizer of single characters: <pad> <bos> <eos> <unk> are 0 to 3, then one token per character."""
    # Imported here because only a made model needs it, and start-up time counts.
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: number for number, token in enumerate((*_SPECIAL_TOKENS, *chars))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=_SPECIAL_TOKENS[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {f"{token[1:-1]}_token": token for token in _SPECIAL_TOKENS}
    # Written by hand: importing transformers for its own writer takes seconds.
    _write_json(
        Path(folder) / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings},
    )


def make_model_folder(folder: str | Path, make: MakeConfig, seed: int) -> None:
    """Write a whole Hugging Face model folder; it appears under its name only when complete.

    The same `make` and `seed` give the same bytes. Call it in one process. Raises ValueError if the folder exists and
    isn't empty.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} already holds files; use it by model.path, or make the model in another folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    make_folder_without_weights(partial, make)
    config = decoder_config(make)
    weights = RandomWeights(config, seed)
    write_weights(partial, ((name, weights(name)) for name in weights.names), forms=stored_forms(config))
    os.replace(partial, folder)


def make_folder_without_weights(folder: Path, make: MakeConfig) -> None:
    """Write the cheap part of a model folder: config and tokenizer."""
    _write_json(folder / "config.json", {**hf_config_dict(decoder_config(make), torch.float32), **_SPECIAL_IDS})
    _write_json(folder / "generation_config.json", _SPECIAL_IDS)
    make_char_tokenizer(folder, make.chars)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
