"""Random models for benches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import hf_config_dict
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.making.make_model import RandomWeights


def qwen3(**fields: Any) -> DecoderConfig:
    """A Qwen3 with these sizes; fields that it has by default may be given too."""
    defaults = {
        "model_type": "qwen3",
        "rms_eps": 1e-6,
        "rope_theta": 10000.0,
        "qk_norm": True,
        "attention_bias": False,
        "tied_head": True,
        "max_positions": 4096,
    }
    return DecoderConfig(**(defaults | fields))


def qwen25(**fields: Any) -> DecoderConfig:
    """A Qwen2.5 with these sizes."""
    defaults = {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "qk_norm": False,
        "attention_bias": True,
        "max_positions": 32768,
    }
    return qwen3(**(defaults | fields))


QWEN_0_5B = qwen25(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_size=64,
)
"""The shape of Qwen2.5-0.5B."""
QWEN_7B = qwen25(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_size=128,
    tied_head=False,
)
"""The shape of Qwen2.5-7B."""
TINY = qwen3(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
)
"""200 thousand parameters: what any device has done at once."""


def write_model(folder: Path, config: DecoderConfig, **hf_fields: Any) -> None:
    """Make a Hugging Face folder with random float32 weights; `hf_fields` are added to its config.json."""
    write_config(folder, config, **hf_fields)
    weights = RandomWeights(config, seed=0)
    write_weights(folder, ((name, weights(name)) for name in weights.names))


def write_config(folder: Path, config: DecoderConfig, **hf_fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config_dict(config, torch.float32) | hf_fields))
