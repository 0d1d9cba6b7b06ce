"""Weights by the decoder's names: safetensors files of the Hugging Face layout in and out.

Names are transformers', except that the decoder stacks the experts of a layer, which files hold one by one.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.engines.models.hf.tensor_files import INDEX_FILE, SINGLE_FILE, TensorFiles
from spmdrl.nouns.batch import WeightSlice, whole_slice

_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
VALUE_HEAD = "score.weight"
# One expert's weight as files name it, and the decoder's weight of all experts of a layer.
_OF_ONE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj)\.weight")
_STACKED = re.compile(r"(.*\.mlp\.experts)\.((?:gate|up|down)_proj)")

T = TypeVar("T")


class WeightSource(Protocol):
    """Reader of weights by name and slice."""

    def read(self, wanted: WeightSlice, /) -> Tensor:
        """Return the values of one box of a named weight."""
        ...


class WeightFiles:
    """The weights of a Hugging Face folder by the decoder's names; `open_weights` checks that they fit a decoder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._tensors = TensorFiles(self.folder)
        self._num_experts = count_experts(self._tensors.names)

    @property
    def names(self) -> list[str]:
        """Names of all weights, as the decoder has them."""
        return sorted([name for name in self._tensors.names if not is_of_one_expert(name)] + list(self._num_experts))

    @property
    def main_dtype(self) -> str:
        """Dtype of most elements in the files, such as bfloat16."""
        elements: Counter[str] = Counter()
        for name in self._tensors.names:
            elements[self._tensors.dtype(name)] += math.prod(self._tensors.shape(name))
        [(dtype, _)] = elements.most_common(1)
        return _DTYPE_NAMES.get(dtype, dtype.lower())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape of a weight; raises ValueError if its experts differ."""
        shape = self._alike(name, self._tensors.shape)
        return (self._num_experts[name], *shape) if name in self._num_experts else shape

    def dtype(self, name: str) -> str:
        """Return a weight's stored dtype in safetensors' terms, like BF16; raises ValueError if its experts differ."""
        return self._alike(name, self._tensors.dtype)

    def read(self, wanted: WeightSlice) -> Tensor:
        """Read one slice into a new CPU tensor of the stored dtype; raises ValueError if the files lack it."""
        if wanted.name == VALUE_HEAD:
            self._check_value_head_has_no_bias()
        if wanted.name not in self._num_experts:
            return self._read(wanted)
        self._check_fits(wanted)
        # At least one is read, for its dtype.
        experts = range(wanted.starts[0], wanted.stops[0]) or range(1)
        of_one = [
            WeightSlice(expert_name(wanted.name, expert), wanted.starts[1:], wanted.stops[1:]) for expert in experts
        ]
        first = self._read(of_one[0])
        stacked = first.new_empty(wanted.shape)
        for out, part in zip(stacked, of_one, strict=False):
            out.copy_(first if part is of_one[0] else self._read(part))
        return stacked

    def _read(self, wanted: WeightSlice) -> Tensor:
        self._check_fits(wanted)
        read = self._tensors.read(wanted)
        # Extremes of values with a NaN are NaN, and are computed at memory speed.
        if read.numel() and not torch.stack(read.aminmax()).isfinite().all():
            path = self._tensors.path(wanted.name)
            raise ValueError(
                f"{path}: {wanted.name} holds NaN or infinity; get the file again, or an earlier checkpoint"
            )
        return read

    def _check_fits(self, wanted: WeightSlice) -> None:
        shape = self.shape(wanted.name)
        if len(shape) != len(wanted.stops) or any(stop > size for stop, size in zip(wanted.stops, shape, strict=True)):
            raise ValueError(
                f"{wanted.name} in {self.folder} has shape {shape}, but elements {wanted.starts} to "
                f"{wanted.stops} are wanted of it; do config.json and the weights belong together?"
            )

    def _check_value_head_has_no_bias(self) -> None:
        """Raise ValueError for a nonzero bias, as in transformers' token classifiers: values would be off by it."""
        if "score.bias" not in self._tensors.names:
            return
        bias = self._tensors.read(whole_slice("score.bias", self._tensors.shape("score.bias")))
        if bias.any():
            raise ValueError(
                f"score.bias in {self.folder} is {bias.tolist()}, but a value head has no bias; start it anew "
                "(WithNewHead), or give a model whose score.bias is 0"
            )

    def _alike(self, name: str, look: Callable[[str], T]) -> T:
        """Return a fact that all experts of a weight share, or the weight's own if it isn't stacked."""
        count = self._num_experts.get(name)
        names = [name] if count is None else [expert_name(name, expert) for expert in range(count)]
        first = look(names[0])
        for other in names[1:]:
            if (found := look(other)) != first:
                raise ValueError(
                    f"{other} in {self.folder} is {found}, but {names[0]} is {first}; all experts of a layer have one "
                    "shape and dtype, so fetch the files again"
                )
        return first


def is_stacked(name: str) -> bool:
    """Return True for the decoder's name of one weight of all experts of a layer."""
    return _STACKED.fullmatch(name) is not None


def expert_name(stacked: str, expert: int) -> str:
    """Return the files' name of one expert's part of a stacked weight."""
    match = _STACKED.fullmatch(stacked)
    assert match is not None, f"{stacked} is not the name of a stacked weight"
    return f"{match[1]}.{expert}.{match[2]}.weight"


def count_experts(names: Iterable[str]) -> dict[str, int]:
    """Count the experts of each stacked weight in these files' names; raises ValueError for a gap."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        if match := _OF_ONE_EXPERT.fullmatch(name):
            numbers.setdefault(f"{match[1]}.{match[3]}", []).append(int(match[2]))
    for stacked, found in numbers.items():
        if sorted(found) != list(range(len(found))):
            lacking = min(set(range(len(found))) - set(found))
            raise ValueError(f"{expert_name(stacked, lacking)} is missing beside {len(found)} other experts of it")
    return {stacked: len(found) for stacked, found in numbers.items()}


def is_of_one_expert(name: str) -> bool:
    """Return True for the files' name of a weight of a single expert."""
    return _OF_ONE_EXPERT.fullmatch(name) is not None


def unstack(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight under the files' names: stacked ones as views of their experts."""
    for name, weight in weights:
        if is_stacked(name):
            yield from ((expert_name(name, number), part) for number, part in enumerate(weight.unbind()))
        else:
            yield name, weight


def write_weights(
    folder: str | Path, weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int = 5 * 1024**3
) -> None:
    """Write weights in the Hugging Face layout: model.safetensors, or numbered files and an index.

    Stacked experts are written one by one. Each tensor is copied as it comes, so its storage may be reused for the
    next; at most one file's worth is held. Files get their final names last. Raises ValueError if `folder` already
    holds weights.
    """
    folder = Path(folder)
    if present := sorted(path.name for path in folder.glob("*.safetensors*")):
        raise ValueError(f"{folder} already holds weights ({present[0]}); write to a fresh folder")
    names_of_shard: list[list[str]] = []
    total_bytes = 0
    for shard in _in_shards(unstack(weights), max_shard_bytes):
        save_file(shard, _partial_file(folder, len(names_of_shard)), metadata={"format": "pt"})
        names_of_shard.append(list(shard))
        total_bytes += sum(weight.nbytes for weight in shard.values())
    _give_final_names(folder, names_of_shard, total_bytes)


def _in_shards(weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Collect copies of the weights into shards of at most `max_shard_bytes`, or of one larger weight."""
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, weight in weights:
        if shard and shard_bytes + weight.nbytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = {}, 0
        assert name not in shard, f"{name} is given twice"
        shard[name] = weight.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        shard_bytes += weight.nbytes
    yield shard


def _partial_file(folder: Path, number: int) -> Path:
    return folder / f"model-{number + 1:05d}.partial"


def _give_final_names(folder: Path, names_of_shard: list[list[str]], total_bytes: int) -> None:
    count = len(names_of_shard)
    if count == 1:
        os.replace(_partial_file(folder, 0), folder / SINGLE_FILE)
        return
    weight_map = {}
    for number, names in enumerate(names_of_shard):
        file_name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        os.replace(_partial_file(folder, number), folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class WithNewHead:
    """Weights of a value model that starts from a language model's, or from another value model's without its head.

    The head is zero, so that every value is 0 until it is trained.
    """

    def __init__(self, source: WeightSource):
        self._source = source

    def read(self, wanted: WeightSlice, /) -> Tensor:
        return torch.zeros(wanted.shape) if wanted.name == VALUE_HEAD else self._source.read(wanted)
