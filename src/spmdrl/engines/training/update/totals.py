"""Joins what micro-batches reported, over all ranks, so that every rank draws the same conclusions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from spmdrl.engines.training.batching.packed_rows import LossTerms
from spmdrl.resources.collectives import gather_bytes


@dataclass
class Tally:
    """Loss terms of this rank's micro-batches, left on the device until all are done."""

    terms: list[LossTerms] = field(default_factory=list)

    def add(self, terms: LossTerms) -> None:
        metrics = {name: (total.detach(), count.detach()) for name, (total, count) in terms.metrics.items()}
        maxima = {name: value.detach() for name, value in terms.maxima.items()}
        self.terms.append(LossTerms(terms.loss.detach(), metrics, maxima))

    def entries(self) -> Iterator[tuple[str, float, float]]:
        """(name, sum, count) of every micro-batch; the loss goes under the empty name."""
        for terms in self.terms:
            yield "", float(terms.loss), 0.0
            for name, (total, count) in terms.metrics.items():
                yield name, float(total), float(count)

    def peaks(self) -> Iterator[tuple[str, float]]:
        """(name, value) of every micro-batch, of what the largest counts."""
        for terms in self.terms:
            for name, value in terms.maxima.items():
                yield name, float(value)


@dataclass(frozen=True)
class Totals:
    """Sums and maxima over all ranks."""

    loss: float
    grad_norm: float
    metrics: dict[str, tuple[float, float]]
    maxima: dict[str, float]

    @classmethod
    def gathered(cls, tally: Tally | None, squared_norm: float) -> Totals:
        """Add up in rank order, so that every rank gets the same bits. Collective over all ranks.

        Give no tally where another rank reports the same micro-batches, and the square of the gradients that this
        rank counts as the holder of. Bytes rather than a sum of vectors: a rank that ran only dummies doesn't know
        the metrics' names.
        """
        own = tally or Tally()
        payload = json.dumps([squared_norm, _summed(own.entries()), _largest(own.peaks())]).encode()
        answers = [json.loads(answer) for answer in gather_bytes(payload)]
        sums = _summed((name, *pair) for _, pairs, _ in answers for name, pair in pairs.items())
        peaks = _largest(peak for *_, maxima in answers for peak in maxima.items())
        loss, _ = sums.pop("", (0.0, 0.0))
        return cls(loss, math.sqrt(sum(square for square, *_ in answers)), sums, peaks)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def _summed(entries: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    sums: dict[str, tuple[float, float]] = {}
    for name, total, count in entries:
        old_total, old_count = sums.get(name, (0.0, 0.0))
        sums[name] = (old_total + total, old_count + count)
    return sums


def _largest(peaks: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The largest value of each name; a NaN among them is not lost."""
    largest: dict[str, float] = {}
    for name, value in peaks:
        known = largest.get(name, -math.inf)
        largest[name] = value if math.isnan(value) or value > known else known
    return largest
