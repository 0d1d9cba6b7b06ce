"""Jobs with a rank that is killed at a stage: the same command, or a restart by torchrun, ends them unchanged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.faults.fault_jobs import FaultJobs, JobEnd, TimedKill, difference, outcome_of
from tests.bench.faults.fault_tally import Tally
from tests.bench.faults.planned_faults import MODULE, POINTS, VARIABLE

MOST_SURVIVOR_SECONDS = 30.0
_LAST_STEP = 3
_STEP_OF = {"init": 0, "load": 0, "shutdown": _LAST_STEP}
# Only the first rank renames.
_OF_MAIN = ("checkpoint.rename",)
# These jobs have no environment; `python -m tests.bench sources --kills` has.
_OF_ENVIRONMENTS = ("environment.answer", "environment.record")
# R3 kills ranks that rename.
_SHORT = ("dock.put:1",)
_RESTARTED = (("backward", 1), ("generate", 0), ("checkpoint.write", 1))
_TORCHRUN_SECONDS = 180.0


def kills(root: Path, *, is_short: bool, part: tuple[int, int]) -> list[Tally]:
    """Every stage x the first and the last rank; survivors must end by themselves, and the same command finish."""
    jobs, killed, after = FaultJobs(root, 2), Tally("R1", "SIGKILL of a rank, then the same command"), AfterKill()
    if not jobs.run("whole").is_done:
        raise RuntimeError(f"the undisturbed run failed: {jobs.root / 'whole.screen'}")
    whole = outcome_of(root / "whole")
    number, count = part
    for index, (stage, rank) in enumerate(_stages_and_ranks(is_short)):
        if index % count != number:
            continue
        name = f"killed_{index}"
        end = after.run(jobs, name, fault=f"{stage}:{rank}:{_STEP_OF.get(stage, 2)}:sigkill")
        problem = None if end.is_killed else f"no rank was killed, exit codes {end.codes}"
        with killed.timed(f"{stage} of rank {rank}") as problems:
            again = jobs.run(name)
            problem = problem or (difference(whole, outcome_of(root / name)) if again.is_done else again.screen[-400:])
            problems += [problem] if problem else []
    restarted = [] if number else [_restarts_of_one_rank(root) if is_short else _restarts(jobs, whole, _RESTARTED)]
    return [killed, *after.tallies, *restarted]


class AfterKill:
    """Runs jobs one of whose ranks is killed, and counts what is left of them."""

    def __init__(self, when: str = "at a stage"):
        self._noticed = Tally("R1", f"survivors of a rank killed {when} stop within 30 s")
        self._left = Tally("R14", f"processes and shared memory after a kill {when}")

    @property
    def tallies(self) -> list[Tally]:
        return [tally for tally in (self._noticed, self._left) if tally.injected]

    def run(self, jobs: FaultJobs, name: str, *, fault: str = "", kill: TimedKill | None = None) -> JobEnd:
        """Run a job until all its ranks have ended by themselves."""
        memory = _named_memory()
        end = jobs.run(name, fault=fault, kill=kill)
        if end.is_killed:
            seconds, what = end.survivor_seconds, fault or str(kill)
            late = "" if seconds < MOST_SURVIVOR_SECONDS else f"{what}: {seconds:.0f} s"
            if any(code != -signal.SIGKILL for code in end.codes):
                self._noticed.count(seconds, late or None)
            leftovers = [*map(str, end.left), *(_named_memory() - memory)]
            self._left.count(seconds, f"{what}: {leftovers}" if leftovers else None)
        return end


def _restarts_of_one_rank(root: Path) -> Tally:
    """With one rank, as the two processes of two would take seconds more to start, twice."""
    folder = root / "alone"
    folder.mkdir()
    jobs = FaultJobs(folder, 1)
    if not jobs.run("whole").is_done:
        raise RuntimeError(f"the undisturbed run failed: {folder / 'whole.screen'}")
    return _restarts(jobs, outcome_of(folder / "whole"), [("backward", 0)])


def _restarts(jobs: FaultJobs, whole: Mapping[str, Any], killed: Sequence[tuple[str, int]]) -> Tally:
    """The same under torchrun, which starts the ranks anew by itself."""
    tally = Tally("R1", "SIGKILL of a rank under torchrun --max-restarts 1")
    for stage, rank in killed:
        name = f"restarted_{stage}"
        with tally.timed(f"{stage} of rank {rank}") as problems:
            code = _torchrun(jobs, name, f"{stage}:{rank}:2:sigkill")
            problem = difference(whole, outcome_of(jobs.root / name)) if code == 0 else f"exit code {code}"
            problems += [problem] if problem else []
    return tally


def _stages_and_ranks(is_short: bool) -> Iterator[tuple[str, int]]:
    for stage in [stage for stage in POINTS if stage not in _OF_ENVIRONMENTS]:
        for rank in (0,) if stage in _OF_MAIN else (0, 1):
            if not is_short or f"{stage}:{rank}" in _SHORT:
                yield stage, rank


def _named_memory() -> set[str]:
    folder = Path("/dev/shm")  # noqa: S108 - read, to see what is left there
    return {path.name for path in folder.glob("spmdrl*")} if folder.is_dir() else set()


def _torchrun(jobs: FaultJobs, name: str, fault: str) -> int:
    options = ["--standalone", f"--nproc-per-node={jobs.num_ranks}", "--max-restarts=1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *options]
    environment = {**os.environ, VARIABLE: fault, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "-m", MODULE, *jobs.command(name)]
    return subprocess.run(
        command, env=environment, capture_output=True, timeout=_TORCHRUN_SECONDS, check=False
    ).returncode
