"""A rank that is slower than the others, step after step, is named; none is where all are alike."""

from __future__ import annotations

import re
from pathlib import Path

from tests.bench.faults.fault_jobs import FaultJobs
from tests.bench.faults.fault_tally import Tally

_NUM_STEPS = 10
# Five in a row, behind those in which little was seen of the stages.
_MOST_STEPS = 8
_SECONDS = {"generate": 0.1, "forward": 0.3, "reward": 1.0, "optim": 0.4}
"""By point, by how much one rank is slower each time it passes there: a multiple of what its step takes."""
_STAGES = {"generate": "generation", "forward": "update", "reward": "reward", "optim": "update"}
_SETTINGS = (f"train.max_steps={_NUM_STEPS}", "rollout.prompts_per_step=16", "checkpoint.interval=0", "data.eval=null")
_SLOW = re.compile(r"WARNING: step (\d+): rank (\d+) is slow: .*most of it in (\w+) ")


def slow_ranks(root: Path, *, num_healthy: int, part: tuple[int, int]) -> list[Tally]:
    """Each stage x two ranks; and so many runs in which none is slow."""
    named = Tally("R15", f"a slow rank, to be named within {_MOST_STEPS} steps")
    healthy = Tally("R15", "no slow rank")
    jobs = FaultJobs(root, 2, *_SETTINGS)
    cases: list[tuple[str, int] | None] = [(point, rank) for point in _SECONDS for rank in (0, 1)]
    for index, case in enumerate(cases + [None] * num_healthy):
        if index % part[1] != part[0]:
            continue
        fault = f"{case[0]}:{case[1]}:1:slow:{_SECONDS[case[0]]}" if case else ""
        with (named if case else healthy).timed(fault or "none") as problems:
            end = jobs.run(f"run_{index}", fault=fault)
            found = [(int(step), int(rank), stage) for step, rank, stage in _SLOW.findall(end.screen)]
            if not end.is_done:
                problems.append(f"exit codes {end.codes}")
            elif case is None:
                problems += [f"named {found}"] if found else []
            elif not any(
                step <= _MOST_STEPS and (rank, stage) == (case[1], _STAGES[case[0]]) for step, rank, stage in found
            ):
                problems.append(f"named {found}")
    return [tally for tally in (named, healthy) if tally.injected]
