"""Adapters by the decoder's names: new ones with PEFT's initial values, and trained ones from and in PEFT's files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.engines.models.hf.model_weights import WeightSource
from spmdrl.engines.models.hf.stored_forms import StoredForms
from spmdrl.engines.models.lora import is_adapter
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.model_config import LoraConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""PEFT's prefix of transformers' names."""
# Settings of PEFT that other computations need, and the values with which adapters are plain ones.
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
    "lora_bias": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "layers_to_transform": None,
    "layer_replication": None, "target_parameters": None, "trainable_token_indices": None,
}  # fmt: skip


class StoredAdapters:
    """Adapters in a folder by PEFT, or by a run."""

    def __init__(self, folder: Path):
        """Read the config and the weights' names. Raises ValueError for adapters of another kind, or damage."""
        self.folder = folder
        try:
            config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            self._file = safe_open(folder / ADAPTER_WEIGHTS, framework="pt")
            self.base = str(config["base_model_name_or_path"])
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{folder} has no adapters that can be read: {error!r:.200}; save them again") from error
        for key, plain in _PLAIN.items():
            if (value := config.get(key) or plain) != plain:
                raise ValueError(
                    f"{folder / ADAPTER_CONFIG}: {key} is {value!r}, but only {plain!r} can be trained here"
                )
        self._names = {name.removeprefix(_PREFIX): name for name in self._file.keys()}
        targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in self._names}
        self.lora = LoraConfig(rank, alpha, tuple(sorted(targets)))

    def check_fits(self, lora: LoraConfig | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse other settings than the adapters', and other weights than the model's `shapes`. Raises ValueError."""
        own = f"lora={{rank: {self.lora.rank}, alpha: {self.lora.alpha:g}, targets: [{', '.join(self.lora.targets)}]}}"
        wanted = {name for name in shapes if is_adapter(name)}
        if lora is None or (lora.rank, lora.alpha) != (self.lora.rank, self.lora.alpha) or wanted != self._names.keys():
            differing = sorted(wanted ^ self._names.keys()) if lora else []
            other = f"; {differing[0]} is in one of both only" if differing else ""
            raise ValueError(f"the adapters of {self.folder} need {own}{other}; set that, or model.path to their base")
        for name, stored in self._names.items():
            if (shape := tuple(self._file.get_slice(stored).get_shape())) != shapes[name]:
                raise ValueError(
                    f"{name} has the shape {shape} in {self.folder}, but {shapes[name]} beside {self.base}; they "
                    "belong to another model"
                )

    @property
    def digest(self) -> str:
        """A short digest of the weights."""
        return hashlib.sha256((self.folder / ADAPTER_WEIGHTS).read_bytes()).hexdigest()[:16]

    def beside(self, source: WeightSource) -> WeightSource:
        """Return the weights of a model with these adapters."""
        return _WithStoredAdapters(source, self)

    def merged_into(self, source: WeightSource) -> WeightSource:
        """Return the weights of a model without adapters that computes what it does with these."""
        return _WithMergedAdapters(source, self)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, wanted: WeightSlice) -> Tensor:
        whole: Tensor = self._file.get_tensor(self._names[wanted.name])
        return whole[wanted.index_within(whole_slice(wanted.name, tuple(whole.shape)))]


class _WithStoredAdapters:
    def __init__(self, source: WeightSource, adapters: StoredAdapters):
        self._source, self._adapters = source, adapters

    def read(self, wanted: WeightSlice, /) -> Tensor:
        return (self._adapters if is_adapter(wanted.name) else self._source).read(wanted)


class _WithMergedAdapters(_WithStoredAdapters):
    def read(self, wanted: WeightSlice, /) -> Tensor:
        weight, lora = self._source.read(wanted), self._adapters.lora
        down, up = (f"{wanted.name.removesuffix('weight')}lora_{letter}.weight" for letter in "AB")
        if down not in self._adapters:
            return weight
        (row, column), (last_row, last_column) = wanted.starts, wanted.stops
        up_part = self._adapters.read(WeightSlice(up, (row, 0), (last_row, lora.rank)))
        down_part = self._adapters.read(WeightSlice(down, (0, column), (lora.rank, last_column)))
        return weight.float() + lora.scale * (up_part.float() @ down_part.float())


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
    weights, config = folder / ADAPTER_WEIGHTS, folder / ADAPTER_CONFIG
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
