"""Scalars recorded on each rank during a step, and their exact reduction over ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["mean", "total", "alike", "max", "min"]
Table = Mapping[str, tuple[Kind, float, float]]
"""Kind, value and count of each metric, as a tuple or, from JSON, a list."""


@dataclass(frozen=True)
class Stat:
    """One rank's record of a metric; for a mean, `value` is the weighted sum and `count` the weight."""

    kind: Kind
    value: float
    count: float = 1.0

    def joined(self, other: Stat) -> Stat:
        """Return the stat of both parts together."""
        if self.kind == "mean":
            return Stat("mean", self.value + other.value, self.count + other.count)
        if self.kind in ("total", "alike"):
            return Stat(self.kind, self.value + other.value)
        return Stat(self.kind, _extreme(self.kind, [self.value, other.value]))


class Recorder:
    """Recorder of a step's metrics on one rank, without communication."""

    def __init__(self) -> None:
        self._stats: dict[str, Stat] = {}

    def mean(self, name: str, value: float, count: float = 1.0) -> None:
        """Record `value` as the mean of `count` things; over records and ranks it is weighted by `count`."""
        if count != 0:
            self.add(name, Stat("mean", float(value) * count, float(count)))

    def mean_of(self, name: str, values: Sequence[float]) -> None:
        """Record each value as the mean of one thing."""
        if values:
            self.add(name, Stat("mean", float(sum(values)), float(len(values))))

    def total(self, name: str, value: float) -> None:
        """Record an amount that adds up over records and ranks."""
        self.add(name, Stat("total", float(value)))

    def alike(self, name: str, value: float) -> None:
        """Record an amount that adds up over records, is the same on every rank, and counts once."""
        self.add(name, Stat("alike", float(value)))

    def maximum(self, name: str, value: float) -> None:
        """Record a value; the metric is the largest over records and ranks."""
        self.add(name, Stat("max", float(value)))

    def minimum(self, name: str, value: float) -> None:
        """Record a value; the metric is the smallest over records and ranks."""
        self.add(name, Stat("min", float(value)))

    @property
    def so_far(self) -> bytes:
        """Encoded stats of this step so far."""
        return encode(self._stats)

    def drain(self) -> dict[str, Stat]:
        """Return the stats so far, sorted by name, and clear them."""
        stats, self._stats = self._stats, {}
        return dict(sorted(stats.items()))

    def add(self, name: str, stat: Stat) -> None:
        """Add a stat to its name's earlier ones. Raises ValueError if they are of another kind."""
        known = self._stats.get(name)
        if known is not None:
            _refuse_two_kinds(name, known.kind, stat.kind)
            stat = known.joined(stat)
        self._stats[name] = stat


def encode(stats: Mapping[str, Stat]) -> bytes:
    """Return the stats of one rank as JSON bytes, to be gathered over ranks and merged."""
    return json.dumps(table_of(stats), sort_keys=True).encode()


def table_of(stats: Mapping[str, Stat]) -> Table:
    """Return the stats in JSON's types."""
    return {name: (stat.kind, stat.value, stat.count) for name, stat in stats.items()}


def merge(payloads: Sequence[bytes]) -> dict[str, float]:
    """Reduce all ranks' encoded stats to one value per metric, sorted by name.

    Sums are correctly rounded (`math.fsum`), so the result doesn't depend on the order of the ranks.
    A rank that didn't record a name contributes nothing to it; a NaN on any rank makes the metric NaN.
    """
    by_name = _stats_by_name([json.loads(payload) for payload in payloads])
    return {name: _mean(stats) if stats[0].kind == "mean" else _total(stats).value for name, stats in by_name.items()}


def totals_of(tables: Sequence[Table]) -> dict[str, Stat]:
    """Return the stats of all ranks together, by the same rules as `merge`; means stay sums and counts."""
    return {name: _total(stats) for name, stats in _stats_by_name(tables).items()}


def _stats_by_name(tables: Sequence[Table]) -> dict[str, list[Stat]]:
    by_name: dict[str, list[Stat]] = {}
    for table in tables:
        for name, (kind, value, count) in table.items():
            stats = by_name.setdefault(name, [])
            if stats:
                _refuse_two_kinds(name, stats[0].kind, kind)
            stats.append(Stat(kind, value, count))
    return dict(sorted(by_name.items()))


def _total(stats: Sequence[Stat]) -> Stat:
    kind, values = stats[0].kind, [stat.value for stat in stats]
    if kind == "mean":
        return Stat(kind, _sum(values), math.fsum(stat.count for stat in stats))
    return Stat(kind, _sum(values) if kind == "total" else _extreme(kind, values))


def _mean(stats: Sequence[Stat]) -> float:
    total = _total(stats)
    if math.isfinite(total.value):
        return total.value / total.count
    # A sum of huge values may overflow though their mean doesn't.
    return _sum([stat.value / total.count for stat in stats])


def _sum(values: Sequence[float]) -> float:
    # fsum refuses inf + -inf and overflow, which a broken step may produce and its log must show.
    try:
        return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    except OverflowError:
        return sum(values)


def _extreme(kind: Kind, values: Sequence[float]) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    return min(values) if kind == "min" else max(values)


def _refuse_two_kinds(name: str, first: Kind, second: Kind) -> None:
    if first != second:
        raise ValueError(f"metric {name} is recorded as {first} and as {second}; record it in one way or use two names")
