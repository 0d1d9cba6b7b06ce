"""Where the seconds of training steps go on one rank, by stage and by kind of work: `train` under PyTorch's profiler.

    python -m tests.bench.training.step_seconds OUT.json FILE.yaml key.path=value ...       on each rank, as `train`

Operations count with the seconds that they take themselves, on the thread that runs the step, those of the CPU's own
library included. What is in flight between ranks while that thread computes nothing is a wait, for the links or for a
slower rank. The rest is Python. Profiling makes small operations and Python slower.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from spmdrl.config.config import load_config
from spmdrl.config.sources import split_arguments
from spmdrl.engines.models.kernels.cpp.cpu_library import cpu_library
from spmdrl.job.run.run import Run
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import check_run
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.world import World
from spmdrl.verbs.train import build, loop
from tests.bench.harness.train_runs import STEPS_OF_WARM_UP

KINDS = ("products", "attention", "other operations", "waits for ranks", "python")
BETWEEN = "between stages"
"""Metrics, files, samples to read, and the dock's opening and closing."""
_STAGE = "stage: "
_OPERATION = re.compile(r"(aten|mkldnn|prims|_?c10d\w*|spmdrl)::")
_PRODUCTS = re.compile(r"::(mm|addmm_?|bmm|baddbmm|_grouped_mm|_linear_pointwise|mkldnn_linear)$")
_ATTENTION = re.compile("attention")
_IN_FLIGHT = ("gloo:", "nccl:", "hccl:")


@dataclass(frozen=True)
class Interval:
    """What the profiler saw of one name, from `start` to `end` in microseconds."""

    name: str
    start: float
    end: float


def seconds_by_stage(
    stages: Sequence[Interval], operations: Sequence[Interval], in_flight: Sequence[Interval], span: tuple[float, float]
) -> dict[str, dict[str, float]]:
    """Seconds by stage and kind in `span`; stages may be nested, and so may operations, on one thread."""
    seconds: dict[str, Counter[str]] = {}
    stage_of = _Innermost(stages)
    busy: list[tuple[float, float]] = []
    for operation, own in _own_times(operations):
        seconds.setdefault(stage_of(operation.start), Counter())[kind_of(operation.name)] += own / 1e6
        if not busy or operation.start >= busy[-1][1]:
            busy.append((operation.start, operation.end))
    waits = without(union((one.start, one.end) for one in in_flight), busy)
    for stage, start, end in _cut(waits, stage_of, span):
        seconds.setdefault(stage, Counter())["waits for ranks"] += (end - start) / 1e6
    for stage, start, end in _cut([span], stage_of, span):
        seconds.setdefault(stage, Counter())["all"] += (end - start) / 1e6
    for counted in seconds.values():
        counted["python"] = max(0.0, counted["all"] - sum(counted[kind] for kind in KINDS if kind != "python"))
    return {stage: {kind: counted[kind] for kind in (*KINDS, "all")} for stage, counted in seconds.items()}


def kind_of(operation: str) -> str:
    """The kind of an operation, by its name."""
    if operation.startswith(("c10d", "_c10d")):
        return "waits for ranks"
    if _ATTENTION.search(operation):
        return "attention"
    return "products" if _PRODUCTS.search(operation) else "other operations"


def _own_times(operations: Sequence[Interval]) -> Iterator[tuple[Interval, float]]:
    """Each operation and the time that no operation inside it takes, by their starts."""
    ordered = sorted(operations, key=lambda one: (one.start, -one.end))
    own, open_ones = [one.end - one.start for one in ordered], list[int]()
    for number, one in enumerate(ordered):
        while open_ones and ordered[open_ones[-1]].end <= one.start:
            open_ones.pop()
        if open_ones:
            own[open_ones[-1]] -= one.end - one.start
        open_ones.append(number)
    return zip(ordered, own, strict=True)


class _Innermost:
    """Which stage a moment is in."""

    def __init__(self, stages: Sequence[Interval]):
        # The shortest first: a stage is shorter than the one around it.
        self._stages = sorted(stages, key=lambda one: one.end - one.start)
        self.bounds = sorted({bound for one in stages for bound in (one.start, one.end)})

    def __call__(self, moment: float) -> str:
        return next((one.name for one in self._stages if one.start <= moment < one.end), BETWEEN)


def _cut(
    parts: Sequence[tuple[float, float]], stage_of: _Innermost, span: tuple[float, float]
) -> Iterator[tuple[str, float, float]]:
    """The parts within the span, cut where stages begin and end."""
    for start, end in parts:
        start, end = max(start, span[0]), min(end, span[1])
        inside = [bound for bound in stage_of.bounds if start < bound < end]
        for left, right in zip([start, *inside], [*inside, end], strict=True):
            if left < right:
                yield stage_of(left), left, right


def union(parts: Iterator[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same moments in parts that neither overlap nor touch, ascending."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(parts):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without(parts: Sequence[tuple[float, float]], taken: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The moments of `parts` that aren't `taken`; both ascend and have no overlaps."""
    left: list[tuple[float, float]] = []
    position = 0
    for start, end in parts:
        while position < len(taken) and taken[position][1] <= start:
            position += 1
        ahead = position
        while ahead < len(taken) and taken[ahead][0] < end:
            if taken[ahead][0] > start:
                left.append((start, taken[ahead][0]))
            start = max(start, taken[ahead][1])
            ahead += 1
        if start < end:
            left.append((start, end))
    return left


class _MarkingConsole(Console):
    """Marks the stages for the profiler."""

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        with record_function(f"{_STAGE}{what}"), super().stage(what):
            yield


@contextmanager
def recorded_calls(library: ctypes.CDLL | None) -> Iterator[None]:
    """Inside this block, calls of the library's functions that were used before are operations to the profiler."""
    # ctypes keeps them under their names; callers look them up there at each call.
    functions = {} if library is None else {name: one for name, one in vars(library).items() if name[0] != "_"}
    try:
        for name, function in functions.items():
            setattr(library, name, _recorded(f"spmdrl::{name}", function))
        yield
    finally:
        for name, function in functions.items():
            setattr(library, name, function)


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with record_function(name):
            return function(*arguments)

    return call


class ProfiledRun(Run):
    """A run whose main rank profiles the steps after warm-up, but for the last, which writes a checkpoint."""

    def __init__(self, checked: CheckedRun, world: World, out: Path):
        super().__init__(checked, world)
        self._out = out
        if world.is_main:
            self.console = _MarkingConsole()

    def remaining_steps(self) -> Iterator[int]:
        if not self.world.is_main:
            yield from super().remaining_steps()
            return
        profiler, num_steps = profile(activities=[ProfilerActivity.CPU]), 0
        with ExitStack() as stack:
            for step in super().remaining_steps():
                if step == STEPS_OF_WARM_UP + 1:
                    stack.enter_context(recorded_calls(cpu_library()))
                    stack.enter_context(profiler)
                    stack.enter_context(record_function(f"{_STAGE}{BETWEEN}"))
                if step == self.num_steps:
                    num_steps = step - STEPS_OF_WARM_UP - 1
                    stack.close()
                yield step
        self._out.write_text(json.dumps(_mean_step(profiler.events() or [], num_steps)))


def _mean_step(events: Sequence[Any], num_steps: int) -> dict[str, Any]:
    """Seconds of the mean step by stage and kind, and its collectives by name."""
    whole = next(one for one in events if one.name == f"{_STAGE}{BETWEEN}")
    seen = [(Interval(one.name, one.time_range.start, one.time_range.end), one) for one in events]
    stages = [Interval(one.name.removeprefix(_STAGE), one.start, one.end) for one, _ in seen if _is_stage(one.name)]
    operations = [one for one, event in seen if event.thread == whole.thread and _OPERATION.match(one.name)]
    in_flight = [one for one, _ in seen if one.name.startswith(_IN_FLIGHT)]
    span = (whole.time_range.start, whole.time_range.end)
    seconds = seconds_by_stage(stages, operations, in_flight, span)
    calls = Counter(one.name for one in in_flight)
    return {
        "seconds": {
            stage: {kind: value / num_steps for kind, value in by_kind.items()} for stage, by_kind in seconds.items()
        },
        "collectives": {name: count / num_steps for name, count in sorted(calls.items())},
    }


def _is_stage(name: str) -> bool:
    return name.startswith(_STAGE) and name != f"{_STAGE}{BETWEEN}"


def main(out: str, *words: str) -> int:
    files, overrides = split_arguments(words)
    checked = check_run(load_config(files, overrides), verb="train")
    with open_job(checked, trains=True) as world, ExitStack() as stack:
        run = ProfiledRun(checked, world, Path(out))
        training = build(checked, run, stack)
        loop(training)
        run.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
