"""Ranks that hang are named, with stage and rows, and end their job; ranks that only take long are left alone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

from spmdrl.runtime.supervision.activity import BETWEEN
from spmdrl.runtime.supervision.hang_report import stacks_file
from tests.bench.faults.fault_jobs import FaultJobs, JobEnd
from tests.bench.faults.fault_tally import Tally
from tests.bench.faults.watched.standing_still import COMES, Way, stand_still

_LIMIT = 2.0
# C's timer, which alone is left where one process holds Python's lock, comes a second and some looks after the limit;
# and where none hangs, a loaded machine must not add to a long stage what is missing to the limit.
_LONG_LIMIT = 4.0
_MOST_LIMITS = 1.5
_PATIENCE = {"checkpoint": 3.0}
MOST_ENDING_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_LONGEST_SECONDS = 90.0
_LAST_STEP = 3
# All kinds are among so many.
_MANY = 200
_POINTS = {
    "data": BETWEEN, "generate": "generation", "dock.get": "", "dock.put": "", "reward": "reward",
    "score": "(?:old_logprobs|probe)", "logprob": "old_logprobs", "advantage": "advantage", "forward": "update",
    "backward": "update", "optim": "update", "reshard": "resharding", "eval": "evaluation",
    "checkpoint.write": "checkpoint", "checkpoint.fsync": "checkpoint", "checkpoint.rename": "checkpoint",
}  # fmt: skip
"""Where a main thread sleeps, and the stage that is to be named; several have docks."""
_OF_MAIN = ("checkpoint.rename",)
_STAGES = ("generation", "reward", "advantage", "update", "resharding")
_PASSED_OFTEN = ("generate", "dock.get", "dock.put", "forward", "backward")
# Once or a few times per step.
_SLOW_POINTS = ("data", "reward", "logprob", "advantage", "optim", "eval")
_SLOW = 0.75
_STRUCK = """
import os, time
from pathlib import Path
from spmdrl.engines.environment.episode import End, Episode, Observation

def never_answer_in_a_later_step():
    metrics = Path("RUN") / "metrics.jsonl"
    if os.environ.get("RANK", "0") == "OF_RANK" and metrics.exists() and metrics.read_text().count("\\n"):
        with open("RUN.screen", "a") as screen:
            screen.write("a call that is never answered COMES\\n")
        time.sleep(3600)

def share_of_digits(completions, **columns):
    never_answer_in_a_later_step()
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]

class Tool:
    def step(self, episode: Episode):
        never_answer_in_a_later_step()
        return End() if len(episode.turns) == 2 else Observation("1")
"""


@dataclass(frozen=True)
class Hang:
    """One way for one rank to hang, and what is to be named."""

    way: Way | Literal["sleep", "reward", "tool"]
    rank: int
    num_ranks: int
    place: str
    """a fault point for those that sleep, else a stage"""
    step: int
    number: int
    """how often the step passes the point before"""

    @property
    def limit_seconds(self) -> float:
        return _LONG_LIMIT if self.way == "lock" and self.num_ranks == 1 else _LIMIT

    @property
    def stage(self) -> str:
        """Pattern of the stage that is to be named."""
        return _POINTS.get(self.place, self.place) or "[a-z_]+"

    @property
    def named_step(self) -> int:
        """The step that is to be named with it."""
        return self.step

    @property
    def most_seconds(self) -> float:
        """Within which it is to be named."""
        return _MOST_LIMITS * self.limit_seconds * _PATIENCE.get(self.stage, 1.0)

    @property
    def has_line(self) -> bool:
        """Whether a line can name it: not where one process holds Python's lock, whose stacks are all there is."""
        return self.way != "lock" or self.num_ranks > 1

    @property
    def is_mute(self) -> bool:
        """Whether nothing of that rank runs any more."""
        return self.way in ("sigstop", "lock")

    @property
    def others_wait(self) -> str:
        """Pattern of what the line is to have about other ranks."""
        return ""

    @property
    def fault(self) -> str:
        """The planned fault by which it comes; empty for those that have none."""
        number = self.number if self.place in _PASSED_OFTEN else 0
        return f"{self.place}:{self.rank}:{self.step}:hang:{number}" if self.way == "sleep" else ""

    def __str__(self) -> str:
        return f"{self.way} in {self.place} of step {self.step}, rank {self.rank} of {self.num_ranks}"

    def settings(self, run: Path) -> list[str]:
        settings = [f"resources.stage_timeout_seconds={self.limit_seconds}", "rollout.prompts_per_step=4"]
        if self.way in ("reward", "tool"):
            path = run.with_suffix(".py")
            words = {"RUN": str(run), "OF_RANK": str(self.rank), "COMES": COMES}
            path.write_text(re.sub("|".join(words), lambda found: words[found[0]], _STRUCK))
            section = "reward" if self.way == "reward" else "environment"
            settings += [f"{section}.timeout_seconds=1000"]
            passed = "reward.variables" if self.way == "reward" else "environment.variables"
            settings += [f"{passed}=[RANK]"] if self.num_ranks > 1 else []
            settings += [f"reward.functions=[{path}:share_of_digits]"] if self.way == "reward" else [
                f"environment.function={path}:Tool", "rollout.stop=[1, 2, 3, 4, 5]",
            ]  # fmt: skip
        return settings


def all_hangs(count: int) -> list[Hang]:
    """So many hangs: every kind as often as any other, but for one more of some, in random steps."""
    random = Random(0)  # noqa: S311 - no secret
    kinds = list(_kinds())
    random.shuffle(kinds)
    return [
        replace(kinds[index % len(kinds)], step=random.randint(2, _LAST_STEP), number=random.randint(0, 1))
        for index in range(count)
    ]


def few_hangs() -> list[Hang]:
    """Three ways in which a main thread gets no further, each in its quickest job."""
    drawn = sorted(all_hangs(_MANY), key=lambda hang: (hang.num_ranks, hang.most_seconds))
    return [next(hang for hang in drawn if hang.way == way) for way in ("sleep", "collective", "tool")]


def _kinds() -> Iterator[Hang]:
    for num_ranks in (1, 2):
        for rank in range(num_ranks):
            for point in _POINTS:
                if rank == 0 or point not in _OF_MAIN:
                    yield Hang("sleep", rank, num_ranks, point, 2, 0)
            yield Hang("reward", rank, num_ranks, "reward", 2, 0)
            yield Hang("tool", rank, num_ranks, "generation", 2, 0)
            for stage in _STAGES:
                yield Hang("lock", rank, num_ranks, stage, 2, 0)
                if num_ranks > 1:
                    # One process alone has no collectives, and nothing watches it while it is stopped.
                    yield Hang("sigstop", rank, num_ranks, stage, 2, 0)
                    yield Hang("collective", rank, num_ranks, stage, 2, 0)


def hangs(root: Path, drawn: Sequence[Hang], *, part: tuple[int, int]) -> list[Tally]:
    """All must be named in time, and their jobs end."""
    named = {
        way: Tally("R2", f"hang: {what}")
        for way, what in {
            "sleep": "a main thread sleeps, and others wait in a collective that it never enters",
            "collective": "a rank is in a collective that no other enters",
            "reward": "a reward function never answers", "tool": "a tool never answers",
            "lock": "C holds Python's lock", "sigstop": "a rank is stopped",
        }.items()
    }  # fmt: skip
    ended = Tally("R2", f"a job that hangs ends with an exit code within {MOST_ENDING_SECONDS:g} s of that")
    for index, hang in enumerate(drawn):
        if index % part[1] == part[0]:
            folder = root / f"hang_{index}"
            folder.mkdir()
            seen = watch_hang(FaultJobs(folder, hang.num_ranks), hang)
            named[hang.way].count(seen.named_seconds, seen.problem(hang))
            ended.count(seen.ending_seconds, f"{hang}: exit codes {seen.end.codes}" if seen.is_late else None)
    return [*(tally for tally in named.values() if tally.injected), ended]


@dataclass(frozen=True)
class Seen:
    """What a job that was to hang showed."""

    end: JobEnd
    struck: bool
    line: str
    named_seconds: float
    """from the hang to the line"""
    ending_seconds: float
    """from there to the first exit code that isn't 0"""
    has_ended: bool
    """whether there was one"""
    stacks: list[int]
    """the ranks that wrote theirs"""
    is_held: list[int]
    """the ranks that had to be killed"""

    @property
    def is_late(self) -> bool:
        """Whether the job ended too late, or not by itself."""
        return self.ending_seconds > MOST_ENDING_SECONDS or not self.has_ended

    def problem(self, hang: Hang) -> str | None:
        """What is wrong, if anything is."""
        unable = {hang.rank} if hang.is_mute else set()
        able = set(range(hang.num_ranks)) - (unable if hang.has_line else set())
        if not self.struck:
            return f"{hang}: it never came: {self.end.screen[-300:]}"
        if self.named_seconds > hang.most_seconds:
            return f"{hang}: named after {self.named_seconds:.2f} s"
        if hang.has_line and not re.search(_words(hang), self.line):
            return f"{hang}: named {self.line or self.end.screen[-300:]!r}"
        if hang.has_line and not re.search(hang.others_wait, self.line):
            return f"{hang}: the other set isn't named in {self.line!r}"
        if missing := able - set(self.stacks):
            return f"{hang}: no stacks of {sorted(missing)}"
        return f"{hang}: ranks {self.is_held} don't end" if set(self.is_held) - unable else None


def _words(hang: Hang) -> str:
    """What the line is to have: the rank, its stage and step, and the rows or calls where some are under way."""
    stage, step = hang.stage, str(hang.named_step)
    if hang.way in ("reward", "tool"):
        stage, step = f"(?:{stage}|evaluation)", r"\d"
    waits = "waits in new_group " if hang.way == "collective" and not hang.is_mute else ""
    waits = "(?:waits in [a-z_]+ )?" if hang.is_mute else waits
    rows = ""
    if hang.place == "generate":
        rows = r"[^;]*rows \d+[^;]* not ended"
    elif hang.way in ("reward", "tool"):
        rows = rf"[^;]*waits for \d+ {'reward' if hang.way == 'reward' else 'environment'} calls: "
    return rf"rank {hang.rank} hangs: .*rank {hang.rank} {waits}in {stage} of step {step} \({rows}"


def watch_hang(jobs: FaultJobs, hang: Hang) -> Seen:
    """Run a job that hangs, and note when it was named and when it ended."""
    run, prepare = jobs.root / "run", None
    if hang.way not in ("sleep", "reward", "tool"):
        prepare = partial(stand_still, hang.way, hang.rank, hang.place, hang.step)
    job = jobs.start("run", *hang.settings(run), fault=hang.fault, prepare=prepare)
    struck = named = ended = 0.0
    started = now = time.monotonic()
    while now < started + _LONGEST_SECONDS and (not ended or now < ended + MOST_ENDING_SECONDS):
        printed, now = job.printed(), time.monotonic()
        struck = struck or now * (COMES in printed)
        is_named = " hangs: " in printed if hang.has_line else _has_stacks(run, hang.rank)
        named = named or now * is_named
        ended = ended or now * any(process.exitcode for process in job.processes)
        if all(process.exitcode is not None for process in job.processes):
            break
        time.sleep(_LOOK_SECONDS)
    held = [rank for rank, process in enumerate(job.processes) if process.exitcode is None]
    for rank in held:
        job.processes[rank].kill()
    end = job.end()
    (line,) = [line for line in end.screen.splitlines() if " hangs: " in line][:1] or [""]
    stacks = [rank for rank in range(hang.num_ranks) if _has_stacks(run, rank)]
    has_struck, named = bool(struck), named or now
    struck = struck or named
    ending_seconds = max(0.0, (ended or now) - named)
    return Seen(end, has_struck, line, named - struck, ending_seconds, bool(ended), stacks, held)


def _has_stacks(run: Path, rank: int) -> bool:
    path = stacks_file(run, rank)
    return path.exists() and "most recent call first" in path.read_text(errors="replace")


def healthy(root: Path, *, count: int, part: tuple[int, int]) -> list[Tally]:
    """Ranks that take most of the limit in a stage, and go on, are left alone."""
    tally = Tally("R2", f"no hang: a stage that takes {_SLOW:g} of the limit, once per step")
    random = Random(1)  # noqa: S311 - no secret
    for index in range(count):
        point, num_ranks = random.choice(_SLOW_POINTS), random.randint(1, 2)
        rank = random.randrange(num_ranks)
        if index % part[1] == part[0]:
            folder = root / f"healthy_{index}"
            folder.mkdir()
            with tally.timed(f"{point} of rank {rank} of {num_ranks}") as problems:
                jobs = FaultJobs(folder, num_ranks, f"resources.stage_timeout_seconds={_LONG_LIMIT}")
                end = jobs.run("run", fault=f"{point}:{rank}:2:slow:{_SLOW * _LONG_LIMIT}")
                problems += [] if end.is_done and " hangs: " not in end.screen else [end.screen[-300:]]
    return [tally]
