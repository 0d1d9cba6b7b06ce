"""Weights by the decoder's names, read from and written to safetensors files in the forms that a family stores."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.engines.models.hf.quantized import DequantizedFiles, Quantization
from spmdrl.engines.models.hf.stored_forms import USUAL_FORMS, StoredForm, StoredForms, expert_number
from spmdrl.engines.models.hf.tensor_files import INDEX_FILE, SINGLE_FILE, TensorFiles
from spmdrl.nouns.batch import WeightSlice, whole_slice

_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
VALUE_HEAD = "score.weight"

T = TypeVar("T")


class WeightSource(Protocol):
    """Reader of weights by name and slice."""

    def read(self, wanted: WeightSlice, /) -> Tensor:
        """Return the values of one box of a named weight."""
        ...


class WeightFiles:
    """The weights of a Hugging Face folder by the decoder's names; `open_weights` checks that they fit a decoder."""

    def __init__(self, folder: str | Path, forms: StoredForms = USUAL_FORMS, quantization: Quantization | None = None):
        self.folder = Path(folder)
        files = TensorFiles(self.folder)
        self._quantization = quantization
        self._tensors = files if quantization is None else DequantizedFiles(files, quantization)
        self._forms = forms
        self._in_folder: dict[str, str] = {}
        """Whole names in the folder, by names without the prefix of a multimodal model."""
        for name in self._tensors.names:
            plain = forms.plain_name(name)
            if plain in self._in_folder:
                raise ValueError(f"{self.folder} holds {plain} both as {self._in_folder[plain]} and as {name}")
            if plain is not None:
                self._in_folder[plain] = name
        self._rule_of: dict[str, StoredForm | None] = {}
        experts: dict[str, list[int]] = {}
        for name in self._in_folder:
            rule = forms.rule_of_stored(name)
            if rule is not None and rule.is_stack:
                experts.setdefault(rule.name(name), []).append(expert_number(name))
            for weight in [name] if rule is None else rule.weights(name):
                if self._rule_of.setdefault(weight, rule) is not rule:
                    raise ValueError(f"{self.folder} holds {weight} both as {self.stored_name(weight)} and in {name}")
        self._num_experts = {stack: _count(stack, numbers) for stack, numbers in experts.items()}

    @property
    def names(self) -> list[str]:
        """Names of all weights, as the decoder has them."""
        return sorted(self._rule_of)

    @property
    def left_out(self) -> Counter[str]:
        """Number of tensors that the decoder has no part in, by the beginning of their names."""
        names = self._tensors.names
        counts = {start: sum(name.startswith(start) for name in names) for start in self._forms.left_out}
        return +Counter(counts)

    @property
    def main_dtype(self) -> str:
        """Dtype of most elements in the files, such as bfloat16, or the method that quantized them."""
        if self._quantization is not None:
            return self._quantization.packing.method
        elements: Counter[str] = Counter()
        for name in self._tensors.names:
            elements[self._tensors.dtype(name)] += math.prod(self._tensors.shape(name))
        [(dtype, _)] = elements.most_common(1)
        return _DTYPE_NAMES.get(dtype, dtype.lower())

    def stored_name(self, weight: str) -> str:
        """Return the name of the tensor, or with `*` tensors, that hold a weight, or would hold a missing one."""
        rule = self._rule_of.get(weight, self._forms.rule_of(weight))
        return weight if rule is None else rule.name(weight)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape of a weight; raises ValueError if its experts differ."""
        shape, rule = self._alike(name, self._tensors.shape), self._rule_of.get(name)
        return shape if rule is None else rule.shape(name, shape, self._num_experts.get(rule.name(name), 0))

    def dtype(self, name: str) -> str:
        """Return a weight's stored dtype in safetensors' terms, like BF16; raises ValueError if its experts differ."""
        return self._alike(name, self._tensors.dtype)

    def read(self, wanted: WeightSlice) -> Tensor:
        """Read one slice as a CPU tensor of the stored dtype; raises ValueError if the files lack it."""
        if wanted.name == VALUE_HEAD:
            self._check_value_head_has_no_bias()
        self._check_fits(wanted)
        rule = self._rule_of.get(wanted.name)
        if rule is None:
            return self._read(wanted)
        boxes = rule.boxes(wanted)
        first = self._read(boxes[0], lambda values: rule.take(wanted, values))
        if not rule.is_by_expert:
            return first
        experts = first.new_empty(wanted.shape)
        for out, box in zip(experts.split(1), boxes, strict=True):
            out.copy_(first if box is boxes[0] else self._read(box, lambda values: rule.take(wanted, values)))
        return experts

    def as_stored(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights in this folder's form, under its names."""
        rules = tuple(dict.fromkeys(rule for rule in self._rule_of.values() if rule is not None))
        for name, tensor in StoredForms(rules).write(weights):
            yield self._in_folder.get(name, name), tensor

    def _read(self, box: WeightSlice, take: Callable[[Tensor], Tensor] = lambda values: values) -> Tensor:
        """Read a stored slice and take a part of it, whose values must be finite."""
        name = self._in_folder.get(box.name, box.name)
        read = take(self._tensors.read(replace(box, name=name)))
        # Extremes of values with a NaN are NaN, and are computed at memory speed.
        if read.numel() and not torch.stack(read.aminmax()).isfinite().all():
            path = self._tensors.path(name)
            raise ValueError(f"{path}: {name} holds NaN or infinity; get the file again, or an earlier checkpoint")
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
        if "score.bias" not in self._rule_of:
            return
        bias = self._tensors.read(whole_slice("score.bias", self._tensors.shape("score.bias")))
        if bias.any():
            raise ValueError(
                f"score.bias in {self.folder} is {bias.tolist()}, but a value head has no bias; start it anew "
                "(WithNewHead), or give a model whose score.bias is 0"
            )

    def _alike(self, name: str, look: Callable[[str], T]) -> T:
        """Return a fact that all stored tensors of a weight share."""
        stored = self.stored_name(name)
        plain = [stored.replace("*", str(expert)) for expert in range(self._num_experts.get(stored, 1))]
        names = [self._in_folder.get(name, name) for name in plain]
        first = look(names[0])
        for other in names[1:]:
            if (found := look(other)) != first:
                raise ValueError(
                    f"{other} in {self.folder} is {found}, but {names[0]} is {first}; all experts of a layer have one "
                    "shape and dtype, so fetch the files again"
                )
        return first


def _count(stack: str, experts: list[int]) -> int:
    """Return the number of a stack's experts; raises ValueError for a gap."""
    if sorted(experts) != list(range(len(experts))):
        lacking = min(set(range(len(experts))) - set(experts))
        raise ValueError(f"{stack.replace('*', str(lacking))} is missing beside {len(experts)} other experts of it")
    return len(experts)


def write_weights(
    folder: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 5 * 1024**3,
    *,
    forms: StoredForms = USUAL_FORMS,
) -> None:
    """Write weights in the Hugging Face layout: model.safetensors, or numbered files and an index.

    They are stored as the family's `forms` say. Each is copied as it comes, so its storage may be reused for the next;
    at most one file's worth is held, and one fused tensor. Files get their final names last. Raises ValueError if
    `folder` already holds weights.
    """
    folder = Path(folder)
    if present := sorted(path.name for path in folder.glob("*.safetensors*")):
        raise ValueError(f"{folder} already holds weights ({present[0]}); write to a fresh folder")
    names_of_shard: list[list[str]] = []
    total_bytes = 0
    for shard in _in_shards(forms.write(weights), max_shard_bytes):
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
        del weight
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
