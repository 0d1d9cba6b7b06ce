"""Access to any box of the weights that one rank holds in slices."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spmdrl.types import WeightSlice


class SlicedWeights:
    """Tensors of one rank that each hold one slice of a weight, so that any box inside a slice can be reached."""

    def __init__(self, tensors: Mapping[WeightSlice, Tensor]):
        self._by_name: dict[str, list[tuple[WeightSlice, Tensor]]] = {}
        for outer, tensor in tensors.items():
            assert tuple(tensor.shape) == outer.shape, (outer, tuple(tensor.shape))
            self._by_name.setdefault(outer.name, []).append((outer, tensor.detach()))

    def view(self, box: WeightSlice) -> Tensor:
        """The box's elements, as a view."""
        for outer, tensor in self._by_name.get(box.name, ()):
            if outer.intersect(box) == box:
                return tensor[box.index_within(outer)]
        raise AssertionError(f"{box} is in none of {[outer for outer, _ in self._by_name.get(box.name, ())]}")
