"""Stored forms: rules by which the tensors of a model folder hold the decoder's weights.

The decoder has one weight per projection, with all experts of a layer stacked. Files hold experts one by one, fuse
projections into one tensor, or store matrices transposed; each family lists the rules of its files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from torch import Tensor

from spmdrl.nouns.batch import WeightSlice

_IN_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class StoredForm:
    """One stored tensor of a layer and the weights that it holds."""

    stored: str
    """Its name in the layer. With `*` for a number, one tensor per expert, all together one weight."""
    parts: Mapping[str, int]
    """The weights' names in the layer, with widths: `dim` repeats one run of them, once or more."""
    dim: int = 0
    """Dim of the weights along which the parts alternate; above 0, dim 0 is the experts."""
    transposed: bool = False
    """True if the last two dims are stored in the other order than the weights have them."""

    @property
    def is_stack(self) -> bool:
        """True if each expert has a tensor of its own."""
        return "*" in self.stored

    @property
    def is_by_expert(self) -> bool:
        """True if experts are read one by one, so that only one expert's other parts are read beside those wanted."""
        return self.is_stack or self.dim > 0

    def name(self, weight: str) -> str:
        """Return the tensor's whole name from the whole name of one of its weights."""
        return _in_layer(weight)[0] + self.stored

    def weights(self, stored: str) -> list[str]:
        """Return the whole names of the weights that a tensor of this whole name holds."""
        return [_in_layer(stored)[0] + part for part in self.parts]

    def shape(self, weight: str, stored: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
        """Return a weight's shape, from the shape of the stored tensor or of each expert's."""
        shape = [*stored]
        if self.transposed:
            shape[-2:] = shape[:-3:-1]
        if self.is_stack:
            return num_experts, *shape
        if len(shape) <= self.dim or shape[self.dim] % self._period:
            raise ValueError(
                f"{self.name(weight)} has shape {stored}, but dim {self.dim} must be a multiple of {self._period} to "
                f"hold {', '.join(self.parts)}; do config.json and the weights belong together?"
            )
        shape[self.dim] = shape[self.dim] // self._period * self._width(weight)
        return tuple(shape)

    def boxes(self, wanted: WeightSlice) -> list[WeightSlice]:
        """Return the slices of stored tensors that `take` needs for a slice of a weight: one, or one per expert.

        One expert is read even for none, for its dtype.
        """
        name, starts, stops = self.name(wanted.name), [*wanted.starts], [*wanted.stops]
        if not self.is_stack:
            starts[self.dim], stops[self.dim] = self._span(wanted)
        if self.transposed:
            starts[-2:], stops[-2:] = starts[:-3:-1], stops[:-3:-1]
        if not self.is_by_expert:
            return [WeightSlice(name, tuple(starts), tuple(stops))]
        experts = range(starts[0], stops[0]) or range(1)
        if self.is_stack:
            return [WeightSlice(name.replace("*", str(one)), tuple(starts[1:]), tuple(stops[1:])) for one in experts]
        return [WeightSlice(name, (one, *starts[1:]), (one + 1, *stops[1:])) for one in experts]

    def take(self, wanted: WeightSlice, values: Tensor) -> Tensor:
        """Return the part of a slice from the values of its box, or one expert's part; a view if possible."""
        if self.transposed:
            values = values.transpose(-1, -2)
        if self.is_stack or self._is_within_a_run(wanted):
            return values
        start = wanted.starts[self.dim] % self._width(wanted.name)
        part = self._within(values, wanted.name).flatten(self.dim, self.dim + 1)
        return part.narrow(self.dim, start, wanted.shape[self.dim])

    def put(self, name: str, weight: Tensor, stored: Tensor | None) -> Tensor:
        """Copy a whole weight into its place; without `stored`, into a new tensor, whose other parts are undefined.

        A tensor with a single part is a view of the weight, if possible.
        """
        if len(self.parts) == 1:
            return weight.transpose(-1, -2).contiguous() if self.transposed else weight
        runs = weight.unflatten(self.dim, (-1, self._width(name)))
        if stored is None:
            shape = [*weight.shape]
            shape[self.dim] = runs.shape[self.dim] * self._period
            if self.transposed:
                shape[-2:] = shape[:-3:-1]
            stored = weight.new_empty(shape)
        self._within(stored.transpose(-1, -2) if self.transposed else stored, name).copy_(runs)
        return stored

    @cached_property
    def _period(self) -> int:
        return sum(self.parts.values())

    def _width(self, weight: str) -> int:
        return self.parts[_in_layer(weight)[1]]

    def _offset(self, weight: str) -> int:
        names = [*self.parts]
        return sum(self.parts[name] for name in names[: names.index(_in_layer(weight)[1])])

    def _within(self, stored: Tensor, weight: str) -> Tensor:
        """Return the view of a weight's part of each run, with a dim of its own for the runs."""
        runs = stored.unflatten(self.dim, (stored.shape[self.dim] // self._period, self._period))
        return runs.narrow(self.dim + 1, self._offset(weight), self._width(weight))

    def _is_within_a_run(self, wanted: WeightSlice) -> bool:
        width = self._width(wanted.name)
        return wanted.starts[self.dim] // width + 1 == -(-wanted.stops[self.dim] // width)

    def _span(self, wanted: WeightSlice) -> tuple[int, int]:
        """Return the stored interval of `dim`: exact within a run, whole runs if there are several."""
        start, stop, width = wanted.starts[self.dim], wanted.stops[self.dim], self._width(wanted.name)
        first = start // width
        if self._is_within_a_run(wanted):
            shift = first * (self._period - width) + self._offset(wanted.name)
            return start + shift, stop + shift
        return first * self._period, max(first, -(-stop // width)) * self._period


@dataclass(frozen=True)
class StoredForms:
    """Rules of a family's files. Weights without a rule are stored as they are, under their own names."""

    rules: tuple[StoredForm, ...]
    """Any of them is read; the first for a weight is written."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names in the files of multimodal models, and the decoder's in their place; the first applies."""
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of weights that the decoder has no part in, such as a vision tower's."""

    def plain_name(self, stored: str) -> str | None:
        """Return a stored tensor's name without the prefix of a multimodal model, or None if it is left out."""
        if stored.startswith(self.left_out):
            return None
        for prefix, ours in self.prefixes.items():
            if stored.startswith(prefix):
                return ours + stored.removeprefix(prefix)
        return stored

    def rule_of_stored(self, name: str) -> StoredForm | None:
        """Return the rule of a stored tensor; None if it is a weight as it is."""
        return self._by_stored.get(_NUMBER.sub(".*.", _in_layer(name)[1]))

    def rule_of(self, weight: str) -> StoredForm | None:
        """Return the rule by which a weight is written; None if it is stored as it is."""
        return self._by_part.get(_in_layer(weight)[1])

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors that hold these whole weights, each as soon as its last part has come.

        Views of the weights, or copies of fused ones: a weight's storage may be reused once the next is taken.
        """
        started: dict[str, Tensor] = {}
        missing: dict[str, set[str]] = {}
        for name, weight in weights:
            rule = self.rule_of(name)
            if rule is None:
                yield name, weight
                continue
            layer, part = _in_layer(name)
            stored = layer + rule.stored
            tensor = rule.put(name, weight, started.get(stored))
            missing.setdefault(stored, {*rule.parts}).discard(part)
            if missing[stored]:
                started[stored] = tensor
                continue
            del missing[stored], weight
            started.pop(stored, None)
            if rule.is_stack:
                yield from ((stored.replace("*", str(number)), one) for number, one in enumerate(tensor.unbind()))
            else:
                yield stored, tensor
            # Not held while the parts of the next are copied.
            del tensor
        if missing:
            stored, parts = next(iter(missing.items()))
            raise ValueError(f"{stored} can't be written without {', '.join(sorted(parts))}; give all of its parts")

    @cached_property
    def _by_stored(self) -> dict[str, StoredForm]:
        return {rule.stored: rule for rule in self.rules}

    @cached_property
    def _by_part(self) -> dict[str, StoredForm]:
        return {part: rule for rule in reversed(self.rules) for part in rule.parts}


def expert_number(stored: str) -> int:
    """Return the number in the name of one expert's tensor."""
    found = _NUMBER.search(_in_layer(stored)[1])
    assert found is not None, f"{stored} has no expert's number"
    return int(found[1])


@lru_cache(maxsize=16)
def _in_layer(name: str) -> tuple[str, str]:
    """Split a name into its layer's prefix and the rest; outside of the layers the prefix is empty."""
    match = _IN_LAYER.fullmatch(name)
    return ("", name) if match is None else (match[1], match[2])


_EXPERTS = "mlp.experts"
EXPERTS_ONE_BY_ONE = tuple(
    StoredForm(f"{_EXPERTS}.*.{name}.weight", {f"{_EXPERTS}.{name}": 1})
    for name in ("gate_proj", "up_proj", "down_proj")
)
USUAL_FORMS = StoredForms(EXPERTS_ONE_BY_ONE)
"""Forms of most families."""
