"""Jobs that are asked to stop at random moments save, leave with 75, and go on as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from spmdrl.runtime.supervision.stop_request import STOPPED
from tests.bench.faults.fault_jobs import FaultJobs, JobEnd, RunningJob, difference, outcome_of
from tests.bench.faults.fault_tally import Tally

# Steps of the last three take a few hundredths of a second, and a time limit has whole seconds.
_NUM_STEPS = {"train": 8, "sft": 200, "preferences": 200, "reward-model": 200}
# So that a request finds steps to come.
_MOST_BEFORE = {"train": 5, "sft": 30, "preferences": 30, "reward-model": 30}
_PAIRS = (
    "data.train=synthetic://addition?low=0&high=9&count=40&max_error=5",
    "data.eval=synthetic://addition?low=0&high=9&count=8&split=test&test_fraction=0.3&max_error=5",
)
_PAIR_STEPS = f"{{max_steps: {_NUM_STEPS['preferences']}, rows_per_step: 7, optim: {{lr: 1.0e-3}}}}"
_SETTINGS = {
    "train": [f"train.max_steps={_NUM_STEPS['train']}"],
    "sft": [f"sft.max_steps={_NUM_STEPS['sft']}"],
    "preferences": [*_PAIRS, f"preferences={_PAIR_STEPS}"],
    "reward-model": [*_PAIRS, f"reward_model={_PAIR_STEPS}"],
}
# What is saved is saved because the job was asked to stop.
_UNSAVED = "checkpoint.interval=0"
# Most of them train; the loop of the other three is one.
_VERBS = (*["train"] * 7, "sft", "preferences", "reward-model")
_COUNT = 60
_MOST_APART_SECONDS = 5.0
_LONGEST_STEP_SECONDS = 0.5
_LOOK_SECONDS = 0.005
_LONGEST_SECONDS = 60.0
# What counts the work: news of rows depend on where these lie, and an evaluation that was left switches weights again.
_OF_WORK = ("dock/metadata_bytes", "reshard/bytes")


@dataclass(frozen=True)
class Stop:
    """One request: when it comes, and to whom."""

    verb: str
    num_ranks: int
    reason: str
    """a signal's name, or checkpoint.save_by"""
    ranks: tuple[int, ...]
    """in the order in which they are sent it"""
    apart_seconds: float
    num_steps_before: int
    """steps that are logged before; -1: the request comes once the run's folder is there"""
    later_seconds: float
    """after that; of a time limit, the seconds that the job has at most"""

    def __str__(self) -> str:
        whom = f" to ranks {self.ranks}, {self.apart_seconds:.1f} s apart" if self.ranks else ""
        return f"{self.reason} of {self.verb} on {self.num_ranks} ranks{whom}, {self.num_steps_before} steps done"


def random_stops(count: int) -> list[Stop]:
    """So many, with the same seed."""
    random = Random(2)  # noqa: S311 - no secret
    return [_random_stop(random, number) for number in range(count)]


def _random_stop(random: Random, number: int) -> Stop:
    verb, num_ranks = _VERBS[number % len(_VERBS)], random.choice((1, 2, 2))
    before, later = random.randint(-1, _MOST_BEFORE[verb]), random.random() * _LONGEST_STEP_SECONDS
    reason = random.choice(("SIGTERM", "SIGUSR1", "SIGTERM", "SIGUSR1", "checkpoint.save_by"))
    if reason == "checkpoint.save_by":
        return Stop(verb, num_ranks, reason, (), 0.0, before, random.randint(1, 4))
    if num_ranks == 1 or random.random() < 0.5:
        return Stop(verb, num_ranks, reason, (random.randrange(num_ranks),), 0.0, before, later)
    ranks = tuple(random.sample(range(num_ranks), num_ranks))
    return Stop(verb, num_ranks, reason, ranks, random.random() * _MOST_APART_SECONDS, before, later)


def stops(root: Path, *, is_short: bool, part: tuple[int, int]) -> list[Tally]:
    """Each is stopped at its moment and goes on; what it comes to is what the undisturbed run came to."""
    tally = Tally("R11", "SIGTERM, SIGUSR1 or a time limit at a random moment, then the same command")
    whole = _WholeRuns(root)
    drawn = random_stops(_COUNT)
    of_all_ranks = [stop for stop in drawn if stop.verb == "train" and len(stop.ranks) > 1]
    for index, stop in enumerate(of_all_ranks[:1] if is_short else drawn):
        if index % part[1] == part[0]:
            jobs = whole.jobs(stop)
            with tally.timed(str(stop)) as problems:
                problems += _problems(jobs, f"stopped_{index}", stop, whole.outcome(stop))
    return [tally]


class _WholeRuns:
    """The runs that nothing disturbs, by verb and number of ranks."""

    def __init__(self, root: Path):
        self._root = root
        self._outcomes: dict[tuple[str, int], dict[str, Any]] = {}

    def jobs(self, stop: Stop) -> FaultJobs:
        folder = self._root / f"{stop.verb}_{stop.num_ranks}"
        folder.mkdir(exist_ok=True)
        jobs = FaultJobs(folder, stop.num_ranks, *_SETTINGS[stop.verb], _UNSAVED, verb=stop.verb)
        if (stop.verb, stop.num_ranks) not in self._outcomes:
            if not (end := jobs.run("whole")).is_done:
                raise RuntimeError(f"the undisturbed run failed: {end.screen[-400:]}")
            self._outcomes[stop.verb, stop.num_ranks] = _outcome(folder / "whole")
        return jobs

    def outcome(self, stop: Stop) -> dict[str, Any]:
        return self._outcomes[stop.verb, stop.num_ranks]


def _problems(jobs: FaultJobs, name: str, stop: Stop, whole: dict[str, Any]) -> list[str]:
    end, num_done = _signalled(jobs, name, stop) if stop.ranks else (_out_of_time(jobs, name, stop), 0)
    if set(end.codes) != {STOPPED} or end.left:
        return [f"exit codes {end.codes}, processes left {end.left}: {end.screen[-400:]}"]
    saved = max((int(path.name[5:]) for path in (jobs.root / name / "checkpoints").glob("step_*")), default=0)
    if saved < num_done:
        return [f"step {saved} is saved of {num_done}"]
    # The limit may be another now: it says when a run leaves, not what it does.
    again = jobs.run(name)
    if not again.is_done:
        return [again.screen[-400:]]
    problem = difference(whole, _outcome(jobs.root / name))
    return [problem] if problem else []


def _signalled(jobs: FaultJobs, name: str, stop: Stop) -> tuple[JobEnd, int]:
    """The end of a job that is sent its signals, and how many steps were logged when the first one came."""
    job = jobs.start(name)
    num_done = _send(job, stop, jobs.root / name)
    return job.end(), num_done


def _out_of_time(jobs: FaultJobs, name: str, stop: Stop) -> JobEnd:
    """The end of a job that has so many seconds, or fewer: one that was done before is run anew with one less."""
    seconds = int(stop.later_seconds)
    while (end := jobs.start(name, f"checkpoint.save_by=0:00:{seconds:02}").end()).is_done and seconds > 1:
        seconds -= 1
        shutil.rmtree(jobs.root / name)
    return end


def _send(job: RunningJob, stop: Stop, run: Path) -> int:
    """Send the signals at their moment; returns how many steps were logged then."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while _num_logged(run) < stop.num_steps_before and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    time.sleep(stop.later_seconds)
    num_done = max(0, _num_logged(run))
    for number, rank in enumerate(stop.ranks):
        if number:
            _wait_for_end(job.processes, stop.apart_seconds)
        with suppress(ProcessLookupError):
            if job.processes[rank].exitcode is None:
                os.kill(job.processes[rank].pid or 0, signal.Signals[stop.reason])
    return num_done


def _num_logged(run: Path) -> int:
    """Steps in the metrics; -1 where there is a folder alone, less without one."""
    if not run.exists():
        return -2
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else -1


def _wait_for_end(processes: Sequence[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.exitcode is None for process in processes):
        time.sleep(_LOOK_SECONDS)


def _outcome(run: Path) -> dict[str, Any]:
    outcome = outcome_of(run)
    return outcome | {
        "metrics": [{name: step[name] for name in step if name not in _OF_WORK} for step in outcome["metrics"]]
    }
