"""What every engine of the rollout bench generates, and the loop of a process that runs one of them on request.

Needs nothing but the standard library and replies.py, so that it runs in an environment of its own.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.harness.replies import open_replies

MODEL_FOLDER, WORK_FILE = "model", "work.json"
# Standard deviation of the logarithms of log-normal lengths, as of responses that reason more or less long.
_SPREAD = 0.8


@dataclass(frozen=True)
class Lengths:
    """How long responses become: row b ends at `limits[b]` tokens, or before it with one of the stop tokens."""

    limits: tuple[int, ...]
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RolloutWork:
    """Prompts in groups, and the lengths of their responses by the name of a distribution."""

    prompts: tuple[tuple[int, ...], ...]
    group_size: int
    rows_at_once: int
    threads: int
    lengths: dict[str, Lengths]

    @property
    def num_rows(self) -> int:
        return len(self.prompts) * self.group_size

    def prompt(self, row: int) -> tuple[int, ...]:
        return self.prompts[row // self.group_size]

    def save(self, folder: Path) -> None:
        (folder / WORK_FILE).write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> RolloutWork:
        fields = json.loads((folder / WORK_FILE).read_text())
        fields["prompts"] = tuple(map(tuple, fields["prompts"]))
        fields["lengths"] = {
            name: Lengths(tuple(found["limits"]), tuple(found["stop_ids"])) for name, found in fields["lengths"].items()
        }
        return RolloutWork(**fields)


@dataclass(frozen=True)
class WorkSize:
    """How much there is to generate; responses have at most `limit` tokens, a quarter of it in the mean."""

    num_prompts: int
    group_size: int
    prompt_length: int
    limit: int
    vocab_size: int


def make_work(size: WorkSize, *, rows_at_once: int, threads: int) -> RolloutWork:
    """Prompts and three ways to end, whose responses hold about as many tokens in all."""
    rng = random.Random(0)  # noqa: S311 - the same on every machine, and no secret
    half, num_rows, mean = max(1, size.prompt_length // 2), size.num_prompts * size.group_size, size.limit / 4
    prompts = tuple(
        tuple(rng.randrange(size.vocab_size) for _ in range(rng.randint(half, 3 * half)))
        for _ in range(size.num_prompts)
    )
    # The mean of a log-normal variable is exp(location + spread**2 / 2).
    location = math.log(mean) - _SPREAD**2 / 2
    lognormal = (rng.lognormvariate(location, _SPREAD) for _ in range(num_rows))
    lengths = {
        "fixed": Lengths((max(1, round(mean)),) * num_rows),
        "lognormal": Lengths(tuple(min(max(1, round(length)), size.limit) for length in lognormal)),
        # Random weights make every token about as likely, so that each draw ends a row with the same chance.
        "ragged": Lengths((size.limit,) * num_rows, tuple(range(max(1, round(size.vocab_size / mean))))),
    }
    return RolloutWork(prompts, size.group_size, rows_at_once, threads, lengths)


@dataclass(frozen=True)
class EngineRun:
    """One run of an engine through all rows of one distribution."""

    seconds: float
    cpu_seconds: float
    """of the process, which other work on the machine lengthens less"""
    row_lengths: tuple[int, ...]
    """tokens of each response"""
    extra: dict[str, float]
    """figures that only this engine has"""

    @property
    def num_tokens(self) -> int:
        return sum(self.row_lengths)


class BenchEngine(ABC):
    """One engine with the model loaded."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forget what an earlier run computed; this is not timed."""

    @abstractmethod
    def generate(self, lengths: Lengths, rows: Sequence[int], seed: int) -> list[int]:
        """Sample a response to these rows at temperature 1 from the whole vocabulary; returns their lengths."""

    def extra(self) -> dict[str, float]:
        """Figures of the last run that only this engine has."""
        return {}


def measure(engine: BenchEngine, lengths: Lengths, rows: Sequence[int], seed: int) -> EngineRun:
    engine.prepare()
    start, cpu_start = time.perf_counter(), time.process_time()
    row_lengths = engine.generate(lengths, rows, seed)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return EngineRun(seconds, cpu_seconds, tuple(row_lengths), engine.extra())


def serve(make: Callable[[Path, RolloutWork], BenchEngine], folder: Path) -> None:
    """Make the engine; each line on stdin then names the distribution of one run, whose figures are the reply.

    The first reply, which is empty, means that the engine is ready and warm.
    """
    reply = open_replies()
    work = RolloutWork.load(folder)
    engine = make(folder / MODEL_FOLDER, work)
    few = Lengths((4,) * work.num_rows)
    measure(engine, few, range(min(work.rows_at_once, work.num_rows)), seed=0)
    reply({})
    for number, line in enumerate(sys.stdin, start=1):
        reply(asdict(measure(engine, work.lengths[line.strip()], range(work.num_rows), seed=number)))


def counted(token_ids: Sequence[int], limit: int, stop_ids: frozenset[int]) -> int:
    """Length of a response that may have been padded behind its limit or its first stop token."""
    ends = (place for place, token in enumerate(token_ids[:limit], start=1) if token in stop_ids)
    return next(ends, min(limit, len(token_ids)))
