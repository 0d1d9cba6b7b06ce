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
from spmdrl.engines.models.hf.stored_forms import StoredForms
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


def write_adapters(
    folder: Path, adapters: Mapping[str, Tensor], lora: LoraConfig, base_model: str, forms: StoredForms
) -> list[Path]:
    """Write whole adapters as PEFT's `PeftModel.from_pretrained` reads them, for the model of this name.

    `forms` are those of the model's folder, as PEFT adapts transformers' projections.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    stored = _by_stored_projection(adapters, forms)
    tensors = {
        f"{_PREFIX}{path}.lora_{letter}.weight": tensor
        for path, pair in stored.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, weights, metadata={"format": "pt"})
    # PEFT adapts every layer whose name ends in one of these, as we do.
    ranks = {path.rpartition(".")[2]: len(up) for path, (up, _) in stored.items()}
    others = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        # One scale for all.
        "alpha_pattern": {name: rank * lora.scale for name, rank in others.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return [weights, config]


def _by_stored_projection(adapters: Mapping[str, Tensor], forms: StoredForms) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each stored projection, by path.

    A fused one has the ranks of all its parts: their A one below the other, and their B in blocks, 0 elsewhere.
    """
    paths_of: dict[str, list[str]] = {}
    for path in dict.fromkeys(name.partition(".lora_")[0] for name in adapters):
        rule = forms.rule_of(f"{path}.weight")
        stored = path if rule is None else rule.name(f"{path}.weight").removesuffix(".weight")
        paths_of.setdefault(stored, []).append(path)
    found = {}
    for stored, paths in paths_of.items():
        ups, downs = ([adapters[f"{path}.lora_{letter}.weight"] for path in paths] for letter in "AB")
        down = torch.block_diag(*downs)
        if (rule := forms.rule_of(f"{paths[0]}.weight")) is not None:
            parts = dict(zip(paths, down.split([len(one) for one in downs]), strict=True))
            # Parts without an adapter stay 0.
            down = torch.zeros_like(rule.put(f"{paths[0]}.weight", parts[paths[0]], None))
            for path, part in parts.items():
                down = rule.put(f"{path}.weight", part, down)
        found[stored] = torch.cat(ups), down
    return found
