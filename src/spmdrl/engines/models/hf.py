"""Hugging Face model folders: which one a run uses, and its config.json in and out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.hf_families import FAMILIES, Family
from spmdrl.engines.models.hf_head import read_head, write_head
from spmdrl.engines.models.hf_rope import read_rope, write_rope
from spmdrl.engines.models.hf_values import entries, flag, only, values, whole_number
from spmdrl.engines.models.make_config import MakeConfig

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained: a Hugging Face folder, or a small one made with random weights."""

    path: str | None = None
    """Hugging Face model folder, or a hub name such as Qwen/Qwen2.5-0.5B-Instruct."""
    make: MakeConfig | None = None
    """Sizes of a model to make with random weights and a char-level tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto is bfloat16 on accelerators and float32 on CPU."""

    def __post_init__(self) -> None:
        if self.path is None and self.make is None:
            raise ValueError(
                "neither model.path nor model.make is given; set model.path to a Hugging Face folder or hub name, "
                "or model.make to the sizes of a small random model (`make: {}` takes the defaults)"
            )
        if self.path is not None and self.make is not None:
            raise ValueError(f"model.path ({self.path}) and model.make are both given; remove one of them")
        if self.path is not None and not self.path.strip():
            raise ValueError("model.path is empty; give a Hugging Face folder or hub name")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"model.dtype is {self.dtype!r}, but must be auto, float32 or bfloat16")

    def compute_dtype(self, device_kind: str) -> torch.dtype:
        """The dtype that layers compute in on a device of this kind (cpu, cuda, npu)."""
        if self.dtype == "auto":
            return torch.float32 if device_kind == "cpu" else torch.bfloat16
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


def resolve_model_folder(config: ModelConfig) -> Path:
    """Return the local folder of `model.path`, fetched from the hub where no such folder exists.

    Raises ValueError where there is neither a folder nor a hub snapshot to be had.
    """
    assert config.path is not None, "only model.path has a folder to resolve; model.make is made by make_model_folder"
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_NAME.fullmatch(config.path):
        raise ValueError(f"model.path {config.path} is not a folder, nor a hub name of the form owner/name")
    # Imported here because only a hub name needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(config.path, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"model.path {config.path} is not a folder, and the hub's snapshot of that name can't be had "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); check the name, or download it on a machine "
            f"that reaches the hub (`hf download {config.path} --local-dir DIR`) and set model.path to that folder"
        ) from error


def read_config(folder: str | Path) -> DecoderConfig:
    """Read a model folder's config.json; raises ValueError that names whatever the decoder doesn't support."""
    raw = _read_json(Path(folder))
    try:
        return _decoder_config(raw)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from None


def count_prediction_layers(folder: str | Path) -> int:
    """How many layers config.json announces after the decoder's, for further tokens (DeepSeek-V3); they aren't read."""
    return whole_number(_read_json(Path(folder)), "num_nextn_predict_layers", 0, least=0)


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
    """The content of config.json for this decoder with weights stored in `dtype`.

    It holds no token ids: those are the tokenizer's, and stand in generation_config.json.
    """
    family = FAMILIES[config.model_type]
    dtype_name = str(dtype).removeprefix("torch.")
    content: dict[str, Any] = {
        **write_head(family.architecture, config.head),
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
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
    return content | write_rope(config.rope_theta, config.rope_scaling) | family.write(config)


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each weight by name, in the decoder's order: parameters, and buffers that are weights too.

    The names are transformers' own, but for the experts of a layer, which are stacked.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    return {name: tuple(weight.shape) for name, weight in decoder.state_dict().items()}


def _decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    _refuse_unsupported(raw, family)
    hidden_size, num_heads = whole_number(raw, "hidden_size"), whole_number(raw, "num_attention_heads")
    latent = family.read_latent(raw)
    default_head_size = family.default_head_size or hidden_size // num_heads
    attention_bias = flag(raw, "attention_bias", default=False)
    theta, scaling = read_rope(raw)
    head = read_head(raw)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=whole_number(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole_number(raw, "intermediate_size"),
        num_layers=whole_number(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=whole_number(raw, "num_key_value_heads", num_heads if family.has_own_kv_heads else None),
        head_size=latent.head_size if latent else whole_number(raw, "head_dim", default_head_size),
        rms_eps=_rms_eps(raw),
        rope_theta=theta,
        qk_norm=family.has_qk_norm,
        attention_bias=attention_bias if family.has_attention_bias is None else family.has_attention_bias,
        # transformers writes the flag for value models too, which have nothing to tie.
        tied_head=head == "vocab" and flag(raw, "tie_word_embeddings", default=False),
        max_positions=whole_number(raw, "max_position_embeddings"),
        mlp_bias=flag(raw, "mlp_bias", default=False),
        rope_scaling=scaling,
        moe=family.read_moe(raw),
        latent=latent,
        head=head,
    )


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is 'silu'")
    if not family.has_mlp_bias:
        only(raw, "mlp_bias", False)
    if raw.get("quantization_config") is not None:
        method = entries(raw, "quantization_config").get("quant_method")
        raise ValueError(f"quantization_config {method!r} is not supported; give the model's unquantized weights")
    if raw.get("transformers_weights") is not None:
        raise ValueError(
            f"transformers_weights names {raw['transformers_weights']!r} for the weights, which isn't read; give a "
            "folder with model.safetensors or its index"
        )
    _check_token_ids(raw)
    if raw.get("is_causal", True) is not True:
        raise ValueError(f"is_causal is {raw['is_causal']!r}, but supported is causal attention only")
    if raw.get("per_layer_config") is not None:
        raise ValueError("per_layer_config is given, but supported are layers of one shape only")
    _refuse_windows(raw, family)


def _refuse_windows(raw: Mapping[str, Any], family: Family) -> None:
    """Refuse attention that doesn't see every earlier token of the longest row."""
    num_layers, max_positions = whole_number(raw, "num_hidden_layers"), whole_number(raw, "max_position_embeddings")
    kinds = values(raw, "layer_types", str)
    if kinds and len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    window = raw.get("sliding_window", family.default_window)
    if window is not None and type(window) is not int:
        raise ValueError(f"sliding_window is {window!r}, but must be a whole number or null")
    if family.default_window is None and not flag(raw, "use_sliding_window", default=False):
        window = None
    if family.has_window_everywhere:
        num_windows = num_layers
    else:
        first = whole_number(raw, "max_window_layers", 0, least=0)
        num_windows = kinds.count("sliding_attention") if kinds else max(0, num_layers - first)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or (window is None and "sliding_attention" in kinds):
        raise ValueError(f"layer_types {kinds} is not supported; supported is 'full_attention' for each layer")
    if window is not None and num_windows and window < max_positions:
        raise ValueError(
            f"sliding_window hides what is more than {window} tokens back in {num_windows} of {num_layers} layers; "
            f"supported is full attention: where no row is longer than that, set max_position_embeddings to {window} "
            "in config.json"
        )


def _check_token_ids(raw: Mapping[str, Any]) -> None:
    """These are written into checkpoints, and transformers opens none whose ids are of another type or outside."""
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        value = raw.get(key)
        ids = value if key == "eos_token_id" and isinstance(value, list) else [] if value is None else [value]
        if any(type(token_id) is not int for token_id in ids):
            raise ValueError(f"{key} is {value!r}, but must be a token id")
    padding, vocab_size = raw.get("pad_token_id"), whole_number(raw, "vocab_size")
    if padding is not None and not -vocab_size <= padding < vocab_size:
        raise ValueError(f"pad_token_id is {padding}, but vocab_size is {vocab_size}; correct one of them")


def _rms_eps(raw: Mapping[str, Any]) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(value, float) or not value > 0:
        raise ValueError(f"rms_norm_eps is {value!r}, but must be a number above 0 such as 1e-06")
    return value
