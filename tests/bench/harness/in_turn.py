"""Contenders measured in turn, so that all of them see the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Name, Result = TypeVar("Name", bound=Hashable), TypeVar("Result")


@dataclass
class ContenderResults(Generic[Result]):
    """What one contender returned, by round."""

    results: list[Result] = field(default_factory=list)
    missing: str | None = None
    """the last line of the error after which it wasn't called again"""


def in_turn(
    contenders: Mapping[Name, Callable[[], Result]], rounds: int, *, optional: Collection[Name] = ()
) -> dict[Name, ContenderResults[Result]]:
    """Call each contender once per round. Optional ones may raise RuntimeError or OSError."""
    turns: dict[Name, ContenderResults[Result]] = {name: ContenderResults() for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            if turns[name].missing is not None:
                continue
            try:
                turns[name].results.append(contender())
            except (RuntimeError, OSError) as error:
                if name not in optional:
                    raise
                turns[name].missing = str(error).strip().splitlines()[-1]
    return turns


def seconds_of(function: Callable[..., object], *arguments: object) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start
