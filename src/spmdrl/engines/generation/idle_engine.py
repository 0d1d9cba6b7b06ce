"""The engine of a rank that only trains: it wants no weights, gets no requests and is always asleep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.nouns.batch import WeightSlice


class IdleEngine:
    """Engine without a slice of the weights, whose shapes are those of the ranks that generate."""

    wants_iterator: ClassVar[bool] = False

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.version = 0
        self._shapes = shapes

    def submit(self, requests: Sequence[Request]) -> None:
        assert not requests, f"{len(requests)} requests came to a rank that doesn't generate"

    def step(self) -> list[Response]:
        return []

    @property
    def has_work(self) -> bool:
        return False

    def abort(self) -> list[Response]:
        return []

    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        return []

    @property
    def num_unfinished(self) -> int:
        return 0

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def weight_slices(self) -> dict[str, WeightSlice]:
        return {}

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        return {}

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        assert not weights, "a rank that doesn't generate has no weights to borrow"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("a rank that doesn't generate takes no weights")

    def keep_weights(self, names: Iterable[str]) -> None:
        pass

    def wake_cache(self) -> None:
        pass

    def sleep(self) -> None:
        pass

    def cache_bytes_for(self, *, num_groups: int, group_size: int, num_tokens: int) -> int:
        return 0

    def memory_bytes(self) -> dict[str, int]:
        return {"generation_weights": 0, "kv_cache": 0}
