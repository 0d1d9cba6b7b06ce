"""Interfaces of the engines to the resharding flow."""

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
    """set by the flow; while False the engine refuses to compute, which would crash the process or change weights lent
    to generation"""

    @property
    def update_count(self) -> int: ...
    def updates(self, weight: str) -> bool:
        """Return True if updates change a weight of this name."""
        ...

    def reshard(self) -> None: ...
    def shards_for(self, wanted: Iterable[str]) -> Mapping[str, Shard]:
        """Return the shards to fill a generator's weights from; collective if adapters must be merged."""
        ...

    def named_shards(self) -> Mapping[str, Shard]: ...
    def optimizer_tensors(self) -> list[Tensor]: ...
    def drop_gradients(self) -> None: ...


class Generator(Protocol):
    """The part of a generation engine that the flow calls."""

    version: int

    @property
    def wants_iterator(self) -> bool:
        """True if it takes whole weights one after another instead of showing its storage."""
        ...

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return shapes of the whole weights of which it wants slices."""
        ...

    def weight_slices(self) -> Mapping[str, WeightSlice]: ...
    def wake_weights(self, names: Iterable[str] | None = None) -> Mapping[str, Tensor]:
        """Give these slices, or all, their memory, and return all slices, empty ones for weights not named yet."""
        ...

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read these slices in place until it sleeps; never called if it wants an iterator."""
        ...

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None: ...
    def keep_weights(self, names: Iterable[str]) -> None:
        """Keep these filled slices while it sleeps; never called if it wants an iterator."""
        ...

    def wake_cache(self) -> None: ...
    def sleep(self) -> None: ...
    def memory_bytes(self) -> Mapping[str, int]: ...
