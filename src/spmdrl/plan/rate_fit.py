"""Rates of a device fitted to measured parts of steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmdrl.plan.account import Message, Work
from spmdrl.plan.device_profile import GENERATION, NODE, SCORING, TRAINING, LinkRate, Rates
from spmdrl.plan.slot_times import GIB, seconds_of_messages, seconds_of_work

# A rate that the measured parts don't depend on.
_UNLIMITED = 1e6
_ROUNDS = 4


@dataclass(frozen=True)
class TimedPart:
    """A part of a step that was planned and measured."""

    kind: str
    """generation, scoring or training"""
    work: Work
    messages: Counter[Message]
    seconds: float

    def error(self, rates: Mapping[str, Rates], links: Mapping[str, LinkRate], ranks_per_node: int) -> float:
        """Return the relative error of the time by these rates."""
        computed = seconds_of_work(self.work, rates[self.kind], overlaps=False)
        return (computed + seconds_of_messages(self.messages, links, ranks_per_node)) / self.seconds - 1


def fit_rates(parts: Sequence[TimedPart], links: Mapping[str, LinkRate]) -> tuple[dict[str, Rates], LinkRate]:
    """Return the rates by kind of work, and that of the link between the ranks of a node.

    Least squares of relative errors, without negative rates. Training's messages, which are large, give the link's
    rate; those of generation with tensor ranks, many and small, the time of each. Without any the link is that in
    `links`.
    """
    training, generation, scoring = (
        [part for part in parts if part.kind == kind] for kind in (TRAINING, GENERATION, SCORING)
    )
    rates, link = {}, links[NODE]
    rates[TRAINING], each = _fit(training, list(map(_sent, training)))
    if any(part.messages for part in training):
        link = LinkRate(_rate(each[1], GIB), each[0] * 1e6)
    numbers = [_sent(part)[:1] for part in generation]
    rates[GENERATION], each = _fit(_without_messages(generation, replace(link, message_us=0.0)), numbers)
    if each[0]:
        link = replace(link, message_us=each[0] * 1e6)
    rates[SCORING], _ = _fit(_without_messages(scoring, link), [()] * len(scoring))
    return rates, link


def _without_messages(parts: Sequence[TimedPart], link: LinkRate) -> list[TimedPart]:
    sent = [seconds_of_messages(part.messages, {NODE: link}, 1 << 30) for part in parts]
    return [
        replace(part, seconds=max(part.seconds - own, part.seconds / 10)) for part, own in zip(parts, sent, strict=True)
    ]


def _fit(parts: Sequence[TimedPart], sent: Sequence[Sequence[float]]) -> tuple[Rates, list[float]]:
    """Return the rates, and the seconds of each column of `sent`, a row for each part."""
    seconds = np.array([part.seconds for part in parts])
    # Products count by their flops at first.
    rates = Rates(1e-9, _UNLIMITED, 0.0)
    each: list[float] = []
    for _ in range(_ROUNDS):
        columns = np.array([[*_terms(part.work, rates), *own] for part, own in zip(parts, sent, strict=True)])
        launch, per_flop, per_byte, *each = _least_squares(columns / seconds[:, None])
        rates = Rates(_rate(per_flop, 1e12), _rate(per_byte, GIB), launch * 1e6)
    return rates, each


def _terms(work: Work, rates: Rates) -> tuple[float, float, float]:
    """Return launches, flops and bytes; of products only those that take longer by `rates`."""
    by_bytes = work.product_bytes / (rates.gib_per_second * GIB) > work.flops / (rates.tflops * 1e12)
    others = work.num_bytes - work.product_bytes
    return work.launches, 0.0 if by_bytes else work.flops, others + work.product_bytes * by_bytes


def _sent(part: TimedPart) -> tuple[float, float]:
    """Return messages, each once for each doubling of its ranks, and bytes."""
    doublings = ((count * math.ceil(math.log2(max(len(one.ranks), 2))), count * one.num_bytes)
                 for one, count in part.messages.items())  # fmt: skip
    number, num_bytes = zip(*doublings, strict=True) if part.messages else ((), ())
    return sum(number), sum(num_bytes)


def _least_squares(columns: np.ndarray) -> list[float]:
    """Return the weights whose sums are nearest to 1 in all rows; the most negative is left out until none is."""
    weights, kept = np.zeros(columns.shape[1]), [place for place, one in enumerate(columns.T) if one.any()]
    # Columns of one size, of numbers that differ by many powers of ten.
    sizes = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    while kept:
        found, *_ = np.linalg.lstsq(columns[:, kept] / sizes[kept], np.ones(len(columns)), rcond=None)
        if found.min() >= 0:
            weights[kept] = found / sizes[kept]
            break
        del kept[int(found.argmin())]
    return [float(weight) for weight in weights]


def _rate(seconds_each: float, unit: float) -> float:
    return float(f"{min(1 / seconds_each / unit, _UNLIMITED):.4g}") if seconds_each > 0 else _UNLIMITED
