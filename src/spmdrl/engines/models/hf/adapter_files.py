"""Adapters by the decoder's names: new ones with PEFT's initial values, and trained ones in PEFT's files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.engines.models.hf.model_weights import WeightSource
from spmdrl.engines.models.lora import is_adapter
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.model_config import LoraConfig

_PREFIX = "base_model.model."
"""PEFT's prefix of transformers' names."""


class WithNewAdapters:
    """Weights of a model, and new adapters, which don't change its outputs: their B is 0.

    A is uniform within 1 / sqrt(inputs), like PEFT's and `nn.Linear`'s; it depends on the seed and its name only.
    """

    def __init__(self, source: WeightSource, shapes: Mapping[str, tuple[int, ...]], seed: int):
        """`shapes` has all weights."""
        self._source = source
        self._shapes = shapes
        self._seed = seed

    def read(self, wanted: WeightSlice, /) -> Tensor:
        if not is_adapter(wanted.name):
            return self._source.read(wanted)
        shape = self._shapes[wanted.name]
        if wanted.name.endswith(".lora_B.weight"):
            return torch.zeros(wanted.shape)
        digest = hashlib.sha256(f"{self._seed}:{wanted.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])
        return whole[wanted.index_within(whole_slice(wanted.name, shape))]


def write_adapters(folder: Path, adapters: Mapping[str, Tensor], lora: LoraConfig, base_model: str) -> list[Path]:
    """Write whole adapters as PEFT's `PeftModel.from_pretrained` reads them, for the model of this name."""
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file({_PREFIX + name: adapter for name, adapter in adapters.items()}, weights, metadata={"format": "pt"})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # PEFT adapts every layer whose name ends in one of these, as we do.
        "target_modules": sorted({name.split(".")[-3] for name in adapters}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return [weights, config]
