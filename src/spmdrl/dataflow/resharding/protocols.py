"""The parts of the engines that the resharding flow calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from spmdrl.nouns.batch import WeightSlice


class Shard(Protocol):
    """One rank's part of one weight."""

    @property
    def tensor(self) -> Tensor: ...
    @property
    def slice(self) -> WeightSlice: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...


class Trainer(Protocol):
    """The part of a training engine that the flow calls."""

    weights_on_device: bool
    """set by the flow; the engine refuses to compute while it is False, as that would crash the process, or change what
    is lent to generation"""

    @property
    def update_count(self) -> int: ...
    def updates(self, weight: str) -> bool:
        """Whether a weight of this name isn't always the same."""
        ...

    def reshard(self) -> None: ...
    def shards_for(self, wanted: Iterable[str]) -> Mapping[str, Shard]:
        """The shards that a generator with these weights is filled from; collective if adapters are to be merged."""
        ...

    def named_shards(self) -> Mapping[str, Shard]: ...
    def optimizer_tensors(self) -> list[Tensor]: ...
    def drop_gradients(self) -> None: ...


class Generator(Protocol):
    """The part of a generation engine that the flow calls."""

    version: int

    @property
    def wants_iterator(self) -> bool:
        """Whether it takes whole weights one after the other instead of showing its storage."""
        ...

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the whole weights of which it wants slices."""
        ...

    def weight_slices(self) -> Mapping[str, WeightSlice]: ...
    def wake_weights(self, names: Iterable[str] | None = None) -> Mapping[str, Tensor]:
        """Gives these slices, or all, their memory, and returns all slices, empty ones of weights not named yet."""
        ...

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Has it read slices where they lie until it sleeps; never called where it wants an iterator."""
        ...

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None: ...
    def keep_weights(self, names: Iterable[str]) -> None:
        """Has it keep these slices, which are filled, while it sleeps; never called where it wants an iterator."""
        ...

    def wake_cache(self) -> None: ...
    def sleep(self) -> None: ...
    def memory_bytes(self) -> Mapping[str, int]: ...
