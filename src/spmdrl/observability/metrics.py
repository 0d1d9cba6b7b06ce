"""Scalars recorded on each rank during a step, and their exact reduction over ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["mean", "total", "alike", "max", "min"]


@dataclass(frozen=True)
class Stat:
    """What one rank knows of one metric; for a mean, `value` is the weighted sum and `count` the weight."""

    kind: Kind
    value: float
    count: float = 1.0

    def joined(self, other: Stat) -> Stat:
        """The stat of both parts together."""
        if self.kind == "mean":
            return Stat("mean", self.value + other.value, self.count + other.count)
        if self.kind in ("total", "alike"):
            return Stat(self.kind, self.value + other.value)
        return Stat(self.kind, _extreme(self.kind, [self.value, other.value]))


class Recorder:
    """Collects the metrics of a step on one rank; no communication."""

    def __init__(self) -> None:
        self._stats: dict[str, Stat] = {}

    def mean(self, name: str, value: float, count: float = 1.0) -> None:
        """Record `value` as the mean of `count` things; over records and ranks it is weighted by `count`."""
        if count != 0:
            self._add(name, Stat("mean", float(value) * count, float(count)))

    def total(self, name: str, value: float) -> None:
        """Record an amount that adds up over records and ranks."""
        self._add(name, Stat("total", float(value)))

    def alike(self, name: str, value: float) -> None:
        """Record an amount that adds up over records and is the same on every rank, where it is counted once."""
        self._add(name, Stat("alike", float(value)))

    def maximum(self, name: str, value: float) -> None:
        """Record a value of which the largest over records and ranks counts."""
        self._add(name, Stat("max", float(value)))

    def minimum(self, name: str, value: float) -> None:
        """Record a value of which the smallest over records and ranks counts."""
        self._add(name, Stat("min", float(value)))

    def drain(self) -> dict[str, Stat]:
        """Return the stats so far in the order of their names, and start anew."""
        stats, self._stats = self._stats, {}
        return dict(sorted(stats.items()))

    def _add(self, name: str, stat: Stat) -> None:
        known = self._stats.get(name)
        if known is not None:
            _refuse_two_kinds(name, known.kind, stat.kind)
            stat = known.joined(stat)
        self._stats[name] = stat


def encode(stats: Mapping[str, Stat]) -> bytes:
    """The stats of one rank as JSON bytes, to be gathered over ranks and merged."""
    table = {name: [stat.kind, stat.value, stat.count] for name, stat in stats.items()}
    return json.dumps(table, sort_keys=True).encode()


def merge(payloads: Sequence[bytes]) -> dict[str, float]:
    """Reduce what `encode` made on each rank to one value a metric, in the order of their names.

    Sums are correctly rounded (`math.fsum`), so the result doesn't depend on the order of the ranks.
    A name that a rank didn't record counts nothing there; a NaN on any rank makes the metric NaN.
    """
    stats_of: dict[str, list[Stat]] = {}
    for payload in payloads:
        for name, (kind, value, count) in json.loads(payload).items():
            known = stats_of.setdefault(name, [])
            if known:
                _refuse_two_kinds(name, known[0].kind, kind)
            known.append(Stat(kind, value, count))
    return {name: _reduced(stats_of[name]) for name in sorted(stats_of)}


def _reduced(stats: Sequence[Stat]) -> float:
    kind = stats[0].kind
    values = [stat.value for stat in stats]
    if kind == "mean":
        return _mean(stats)
    return _sum(values) if kind == "total" else _extreme(kind, values)


def _mean(stats: Sequence[Stat]) -> float:
    count = math.fsum(stat.count for stat in stats)
    total = _sum([stat.value for stat in stats])
    if math.isfinite(total):
        return total / count
    # The sum of huge values overflows where their mean doesn't.
    return _sum([stat.value / count for stat in stats])


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
