"""Stages of the accelerator check that end in every way in which one can."""

from __future__ import annotations

import os
import time

from spmdrl.verbs.doctor.doctor import Stage
from spmdrl.verbs.doctor.stage_run import StageRun, StageSkipped


def works(run: StageRun) -> None:
    run.figures["ranks"] = run.world.size
    run.figures["steps_per_second"] = 1.0 - 0.5 * run.world.rank


def finds_a_fault(run: StageRun) -> None:
    works(run)
    run.require(run.world.rank == 0, "two is not three")


def raises(run: StageRun) -> None:
    run.figures["before"] = 1
    raise ValueError("the planted error\nwith a second line")


def crashes(run: StageRun) -> None:
    (run.folder / "model").write_bytes(bytes(1000))
    os.abort()


def hangs(run: StageRun) -> None:
    time.sleep(600)


def is_skipped(run: StageRun) -> None:
    raise StageSkipped("nothing to check here")


PLANTED = [
    Stage(
        function.__name__, f"{__name__}:{function.__name__}", "", starts_jobs=function in (raises, crashes, is_skipped)
    )
    for function in (raises, crashes, is_skipped, works)
]
HANGING = Stage("hangs", f"{__name__}:hangs", "", starts_jobs=True, limit_seconds=6)
FAULTY = Stage("finds_a_fault", f"{__name__}:finds_a_fault", "")
