"""Lines of a timeline file.

A file begins with a header, from whose time all others count; another one follows wherever a process continued it.
Times are whole microseconds. Memory is written in full once per step, then as changes, so that each step can be read
separately; null is an owner that has gone:

    {"step": -1, "rank": 3, "from": 1795302682.5}
    {"step": 1, "s": [stage, start, microseconds], "m": [[link, bytes, seconds], ...], "e": error, "b": 1}
    {"step": 1, "h": [stage, time, peak], "d": bytes by owner on the device, "o": on the host, "p": peaks}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdrl.observability.jsonl import number

MICRO = 1e6
_PLACES = {"d": "device", "o": "host", "p": "peaks"}


@dataclass(frozen=True)
class Moved:
    """Bytes moved over one link, and the seconds that this took, beside other traffic."""

    link: str
    num_bytes: int
    seconds: float

    @property
    def gb_per_second(self) -> float:
        """Rate in 1e9 bytes, as links are rated."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Span:
    """One stage of one step on one rank; `start` and `end` are seconds since the epoch."""

    rank: int
    step: int
    stage: str
    start: float
    end: float
    error: str = ""
    background: bool = False
    """True if it ran beside the stages, in none of their seconds"""
    moved: tuple[Moved, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class HeldMemory:
    """Bytes by owner at a stage's end, and peaks on the device since the previous boundary."""

    stage: str
    device: Mapping[str, int]
    host: Mapping[str, int]
    peaks: Mapping[str, int] = field(default_factory=dict)
    """peaks of each owner; empty in files without"""
    peak: int = 0
    """peak of all owners together, below the sum of their peaks if they took turns"""

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory of one rank at a stage boundary; `time` is seconds since the epoch."""

    rank: int
    step: int
    time: float
    held: HeldMemory


Memory = dict[str, dict[str, int]]
"""Bytes by owner, by place: d, o and p."""


class LineWriter:
    """Encoder of one rank's lines, for one process."""

    def __init__(self, rank: int, origin: float):
        """`origin` is the time from which all others count."""
        self.header = {"step": -1, "rank": rank, "from": origin}
        self._origin = origin
        self._step = -1
        self._known: Memory = {}

    def span(self, span: Span) -> dict[str, Any]:
        start, end = self._micros(span.start), self._micros(span.end)
        line: dict[str, Any] = {"step": span.step, "s": [span.stage, start, end - start]}
        if span.moved:
            line["m"] = [[one.link, one.num_bytes, one.seconds] for one in span.moved]
        return line | ({"e": span.error} if span.error else {}) | ({"b": 1} if span.background else {})

    def memory(self, step: int, time: float, held: HeldMemory) -> dict[str, Any]:
        if step != self._step:
            self._step, self._known = step, {}
        line: dict[str, Any] = {"step": step, "h": [held.stage, self._micros(time), held.peak]}
        for place, name in _PLACES.items():
            known, now = self._known.get(place, {}), dict(getattr(held, name))
            gone = dict.fromkeys(known.keys() - now.keys())
            changed = gone | {owner: size for owner, size in now.items() if known.get(owner) != size}
            if changed:
                line[place] = changed
            self._known[place] = now
        return line

    def _micros(self, time: float) -> int:
        return round((time - self._origin) * MICRO)


class LineReader:
    """Decoder of a file's lines, in order."""

    def __init__(self) -> None:
        self._rank = 0
        self._origin = 0.0
        self._step = -1
        self._known: Memory = {}

    def record(self, line: Mapping[str, Any]) -> Span | MemorySnapshot | None:
        """Return the record in a line; None for a header, and for anything but a timeline's line."""
        step = line.get("step")
        if not isinstance(step, int):
            return None
        if "from" in line:
            self._rank, self._origin = _whole(line.get("rank")), number(line["from"]) or 0.0
            self._step, self._known = -1, {}
            return None
        for key, read in (("s", self._span), ("h", self._memory)):
            if isinstance(fields := line.get(key), list) and len(fields) == 3:
                return read(step, fields, line)
        return None

    def _span(self, step: int, fields: list[Any], line: Mapping[str, Any]) -> Span | None:
        stage, start, micros = fields[0], number(fields[1]), number(fields[2])
        if not isinstance(stage, str) or start is None or micros is None:
            return None
        listed = line.get("m")
        moved = tuple(
            Moved(one[0], one[1], seconds)
            for one in (listed if isinstance(listed, list) else [])
            if isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) and isinstance(one[1], int)
            and (seconds := number(one[2])) is not None and math.isfinite(seconds)
        )  # fmt: skip
        begun, ended = self._origin + start / MICRO, self._origin + (start + max(0.0, micros)) / MICRO
        return Span(self._rank, step, stage, begun, ended, str(line.get("e", "")), "b" in line, moved)

    def _memory(self, step: int, fields: list[Any], line: Mapping[str, Any]) -> MemorySnapshot | None:
        stage, time, peak = fields[0], number(fields[1]), _whole(fields[2])
        if not isinstance(stage, str) or time is None:
            return None
        if step != self._step:
            self._step, self._known = step, {}
        for place in _PLACES:
            changed = line.get(place)
            gone = {owner for owner, size in changed.items() if size is None} if isinstance(changed, Mapping) else set()
            now = self._known.get(place, {}) | _bytes_by_owner(changed)
            self._known[place] = {owner: size for owner, size in now.items() if owner not in gone}
        held = HeldMemory(stage, self._known["d"], self._known["o"], self._known["p"], peak)
        return MemorySnapshot(self._rank, step, self._origin + time / MICRO, held)


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _bytes_by_owner(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        return {}
    return {str(owner): int(amount) for owner, amount in value.items() if isinstance(amount, int)}
