"""Hugging Face model folders: resolving a run's folder, and reading and writing its config.json."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.hf.config_rope import read_rope, read_rotary_share, rope_entries, write_rope
from spmdrl.engines.models.hf.config_values import entries, flag, values, whole_number
from spmdrl.engines.models.hf.families import FAMILIES, TEXT_PARTS, family_name, refuse_unsupported
from spmdrl.engines.models.hf.quantized import Quantization, read_quantization
from spmdrl.engines.models.hf.stored_forms import StoredForms
from spmdrl.nouns.settings.model_config import ModelConfig

_LANGUAGE_MODEL = "ForCausalLM"
_VALUE_MODEL = "ForSequenceClassification"
_VALUE_MODELS = (_VALUE_MODEL, "ForTokenClassification")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Files of a model's config and tokenizer; with the weights, all that is fetched.
HUB_TEXT_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
HUB_FILES = (*HUB_TEXT_FILES, "*.safetensors")


def compute_dtype(model: ModelConfig, device_kind: str) -> torch.dtype:
    """Return the dtype that layers compute in on a device of this kind (cpu, cuda, npu)."""
    if model.dtype == "auto":
        return torch.float32 if device_kind == "cpu" else torch.bfloat16
    return torch.float32 if model.dtype == "float32" else torch.bfloat16


def is_hub_name(path: str) -> bool:
    """Return True if this can name a model on the hub, as owner/name."""
    return _HUB_NAME.fullmatch(path) is not None


def resolve_model_folder(path: str, patterns: Sequence[str] = HUB_FILES, *, key: str = "model.path") -> Path:
    """Return the local folder of `path`; if there is none, its files are fetched from the hub.

    `key` is the place of `path` in the config.

    Raises ValueError if neither a folder nor a hub snapshot is available.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_name(path):
        raise ValueError(f"{key} {path} is not a folder, nor a hub name of the form owner/name")
    # Imported here because only a hub name needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(path, allow_patterns=list(patterns)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"{key} {path} is not a folder, and the hub's snapshot of that name is missing "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); check the name, or download it on a machine "
            f"that reaches the hub (`hf download {path} --local-dir DIR`) and set {key} to that folder"
        ) from error


def read_config(folder: str | Path) -> DecoderConfig:
    """Read a model folder's config.json; raises ValueError that names any unsupported entry."""
    raw = _read_json(Path(folder))
    try:
        return _decoder_config(raw)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from None


def count_prediction_layers(folder: str | Path) -> int:
    """Count config.json's layers after the decoder's, for further tokens (DeepSeek-V3); they aren't read."""
    return whole_number(_read_json(Path(folder)), "num_nextn_predict_layers", 0, least=0)


def quantization_of(folder: str | Path) -> Quantization | None:
    """Return the form in which the folder's weights are quantized, if they are."""
    return read_quantization(_read_json(Path(folder)))


def ignored_attn_factor(folder: str | Path) -> float | None:
    """Return the rope scaling's `attn_factor`, which vLLM multiplies by and transformers, like the decoder, ignores."""
    return rope_entries(_read_json(Path(folder))).get("attn_factor")


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no config.json; it must be a Hugging Face model folder") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; download the file again") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, but must hold one JSON object")
    return raw


def hf_config_dict(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of config.json for this decoder with weights stored in `dtype`, but for token ids: these
    belong to the tokenizer, in generation_config.json.
    """
    family = FAMILIES[config.model_type]
    dtype_name = str(dtype).removeprefix("torch.")
    content: dict[str, Any] = {
        **_write_head(family.architecture, config.head),
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        family.activation[0]: family.activation[1],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tied_head,
        "attention_dropout": 0.0,
        "dtype": dtype_name,
        # Read by transformers before 5.
        "torch_dtype": dtype_name,
    }
    if config.latent is None:
        content["head_dim"] = config.head_size
    if family.has_attention_bias is None:
        content["attention_bias"] = config.attention_bias
    if config.rotary_size is not None:
        content["partial_rotary_factor"] = config.rotary_size / config.head_size
    return content | write_rope(config.rope_theta, config.rope_scaling) | family.write(config)


def _write_head(language_model: str, head: Literal["vocab", "value"]) -> dict[str, Any]:
    """Return the head's entries of config.json, from the name of the family's language model class."""
    if head == "vocab":
        return {"architectures": [language_model]}
    return {
        "architectures": [language_model.removesuffix(_LANGUAGE_MODEL) + _VALUE_MODEL],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def stored_forms(config: DecoderConfig) -> StoredForms:
    """Return the forms in which folders of this decoder's family store its weights."""
    return FAMILIES[config.model_type].stored(config)


@functools.lru_cache(maxsize=8)
def parameter_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Return each weight's shape by name, in the decoder's order: parameters, and buffers that are weights too.

    Names are transformers' own, except where folders store weights in another form.
    """
    # Used by each checkpoint, and a decoder takes milliseconds per layer to build.
    with torch.device("meta"):
        decoder = Decoder(config)
    return MappingProxyType({name: tuple(weight.shape) for name, weight in decoder.state_dict().items()})


@functools.lru_cache(maxsize=8)
def buffer_dtypes(config: DecoderConfig) -> Mapping[str, torch.dtype]:
    """Return the dtype of each buffer that is a weight, by name: it is independent of the parameters' dtype."""
    with torch.device("meta"):
        return MappingProxyType({name: buffer.dtype for name, buffer in Decoder(config).named_buffers()})


def _decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    raw = _text_part(raw)
    model_type = family_name(raw.get("model_type"))
    family = FAMILIES[model_type]
    raw = {**family.default_sizes, **raw}
    refuse_unsupported(raw, family)
    hidden_size, num_heads = whole_number(raw, "hidden_size"), whole_number(raw, "num_attention_heads")
    default_head_size = family.default_head_size or hidden_size // num_heads
    if raw.get("head_dim", 0) is None and not family.allows_null_head_size:
        raise ValueError(f"head_dim is null, but must be a whole number in a {model_type}; remove it or set it")
    attention_bias = flag(raw, "attention_bias", default=family.default_attention_bias)
    theta, scaling = read_rope(raw, family.default_theta)
    head, head_size = _read_head(raw), whole_number(raw, "head_dim", default_head_size)
    share = read_rotary_share(raw, family.rotary_share)
    special = family.read(raw)
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": whole_number(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": whole_number(raw, "intermediate_size", special.get("intermediate_size")),
        "num_layers": whole_number(raw, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": whole_number(raw, "num_key_value_heads", num_heads if family.has_own_kv_heads else None),
        "head_size": head_size,
        "rms_eps": _rms_eps(raw),
        "rope_theta": theta,
        "qk_norm": family.has_qk_norm,
        "attention_bias": attention_bias if family.has_attention_bias is None else family.has_attention_bias,
        # transformers writes the flag for value models too, which have nothing to tie.
        "tied_head": head == "vocab" and flag(raw, "tie_word_embeddings", default=family.default_tying),
        "max_positions": whole_number(raw, "max_position_embeddings"),
        "mlp_bias": flag(raw, "mlp_bias", default=False),
        "rope_scaling": scaling,
        "rotary_size": None if share == 1 else int(head_size * share),
        "head": head,
    }
    return DecoderConfig(**(fields | special))


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's entries of a model that also reads images; others are returned as they are."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in TEXT_PARTS:
        return raw
    common = {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
    return {**entries(raw, "text_config"), **common, "model_type": TEXT_PARTS[model_type]}


def _read_head(raw: Mapping[str, Any]) -> Literal["vocab", "value"]:
    """Return the head of transformers' class; raises ValueError for a classifier with more than one label."""
    classifiers = [name for name in values(raw, "architectures", str) if name.endswith(_VALUE_MODELS)]
    if not classifiers:
        return "vocab"
    # transformers writes the labels' names unless they are two; their number is an older key.
    num_labels = len(entries(raw, "id2label")) or whole_number(raw, "num_labels", 2)
    if num_labels != 1:
        raise ValueError(
            f"architectures names {classifiers[0]} with {num_labels} labels, but a value head gives one number per "
            "token; give a model with num_labels 1"
        )
    return "value"


def _rms_eps(raw: Mapping[str, Any]) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(value, float) or not value > 0:
        raise ValueError(f"rms_norm_eps is {value!r}, but must be a number above 0 such as 1e-06")
    return value
