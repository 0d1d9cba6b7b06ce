"""Adapters by the decoder's names: new ones, as PEFT begins them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from spmdrl.engines.models.hf.model_weights import WeightSource
from spmdrl.engines.models.lora import is_adapter
from spmdrl.types import WeightSlice, whole_slice


class WithNewAdapters:
    """The weights of a model, and new adapters, which change nothing of its outputs: their B is 0.

    A is uniform within 1 / sqrt(inputs), as PEFT and `nn.Linear` begin; it depends on the seed and its name alone.
    """

    def __init__(self, source: WeightSource, shapes: Mapping[str, tuple[int, ...]], seed: int):
        """`shapes` are those of all weights."""
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
