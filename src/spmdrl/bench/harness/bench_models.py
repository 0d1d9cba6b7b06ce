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


def write_model(folder: Path, config: DecoderConfig, **hf_fields: Any) -> None:
    """Make a Hugging Face folder with random float32 weights; `hf_fields` are added to its config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config_dict(config, torch.float32) | hf_fields))
    weights = RandomWeights(config, seed=0)
    write_weights(folder, ((name, weights(name)) for name in weights.names))
