"""Ranks of jobs with two sets that hang: named, and beside them the other set, which waits for theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

from spmdrl.runtime.supervision.activity import BETWEEN
from tests.bench.faults.fault_jobs import FaultJobs
from tests.bench.faults.fault_tally import Tally
from tests.bench.faults.noted_passes import PUSH, Pass, Passes, note_passes
from tests.bench.faults.watched.hung_jobs import MOST_ENDING_SECONDS, Hang, watch_hang

_SETS = ("update", "generation")
_Way = Literal["sleep", "sigstop", "collective"]
_WAYS: Mapping[_Way, str] = {
    "sleep": "a main thread sleeps", "sigstop": "a rank is stopped",
    "collective": "a rank is in a collective that no other enters",
}  # fmt: skip
# The stages that one set alone has; ranks of both are in all others at once.
_OWN_STAGES = ("generation", "reward", "old_logprobs", "advantage", "update")
_HANG_STEPS = (2, 3)
# Three times as long in a start-up, in which three ranks on a loaded machine may have nothing to show for some seconds.
_LIMIT = 4.0
_SLOW_SECONDS = 3.0
_SLOW_STEPS = 4
_MOST_SLOW_PASSES = 2


@dataclass(frozen=True)
class Layout:
    """A job with two sets of ranks."""

    num_training: int
    num_generating: int
    lag: int

    @property
    def num_ranks(self) -> int:
        return self.num_training + self.num_generating

    def ranks(self, of: str) -> Sequence[int]:
        """The ranks of the set `update` or `generation`."""
        return range(self.num_training) if of == "update" else range(self.num_training, self.num_ranks)

    def jobs(self, folder: Path, *settings: str, num_steps: int | None = None) -> FaultJobs:
        """Jobs of so many steps; by default, each step in which one may hang generates too."""
        folder.mkdir()
        num_steps = num_steps or _HANG_STEPS[-1] + self.lag + 1
        own = (f"resources.ranks.generation={self.num_generating}", f"rollout.lag={self.lag}")
        return FaultJobs(folder, self.num_ranks, *own, f"train.max_steps={num_steps}", *settings)

    def __str__(self) -> str:
        return f"{self.num_training} + {self.num_generating} ranks, lag {self.lag}"


LAYOUTS = tuple(Layout(training, 1, lag) for training in (1, 2) for lag in (1, 2))


@dataclass(frozen=True)
class SetHang(Hang):
    """A hang of a rank of one of two sets, at a place that an undisturbed job passed."""

    layout: Layout = LAYOUTS[0]
    passed: Pass = Pass(0.0, 0, "", 0, "")

    @property
    def limit_seconds(self) -> float:
        return _LIMIT

    @property
    def stage(self) -> str:
        return "resharding" if self.passed.stage == PUSH else self.passed.stage

    @property
    def named_step(self) -> int:
        return self.passed.step

    def __str__(self) -> str:
        return f"{super().__str__()}, in {self.stage} of step {self.named_step}, {self.layout}"

    @property
    def fault(self) -> str:
        return f"{self.place}:{self.rank}:{self.step}:hang:{self.number}" if self.way == "sleep" else ""

    @property
    def others_wait(self) -> str:
        """Pattern of the line: a rank of the other set waits, and where it is for this one, none is said to hang."""
        own, other = _SETS if self.rank in self.layout.ranks("update") else _SETS[::-1]
        ranks = f"({'|'.join(map(str, self.layout.ranks(other)))})"
        if self.stage not in _OWN_STAGES:
            return rf"rank {ranks} waits in \w+ in "
        return rf"^(?!.*rank {ranks} hangs).*rank {ranks} waits in \w+ in wait_for_{own} "


def draw_hangs(layout: Layout, passes: Mapping[int, Sequence[Pass]], count: int, random: Random) -> Iterator[SetHang]:
    """So many hangs, in turn of either set and in each way, at random places that ranks passed undisturbed."""
    for index in range(count):
        rank = random.choice(layout.ranks(_SETS[index % 2]))
        way = list(_WAYS)[index // 2 % len(_WAYS)]
        # Each stage as often as any other, however often it is passed.
        places: dict[tuple[str, str], list[tuple[Pass, int]]] = {}
        seen: dict[tuple[str, int], int] = {}
        for one in passes[rank]:
            key = (one.point, one.in_step)
            number = seen[key] = seen.get(key, -1) + 1
            is_place = bool(one.point) if way == "sleep" else not one.point and one.stage != BETWEEN
            if is_place and one.in_step in _HANG_STEPS and one.point != "step":
                places.setdefault((one.point, one.stage), []).append((one, number))
        passed, number = random.choice(places[random.choice(sorted(places))])
        place = passed.point or ("resharding" if passed.stage == PUSH else passed.stage)
        step = passed.in_step if way == "sleep" else passed.step
        yield SetHang(way, rank, layout.num_ranks, place, step, number, layout, passed)


@dataclass(frozen=True)
class HangPlan:
    """How many hangs, and healthy jobs, in equal shares of so many layouts."""

    num_hangs: int
    num_healthy: int
    layouts: Sequence[Layout] = LAYOUTS

    def share(self, count: int, index: int) -> int:
        """How many of so many fall to a layout."""
        return count * (index + 1) // len(self.layouts) - count * index // len(self.layouts)


MANY, FEW = HangPlan(40, 10), HangPlan(2, 0, LAYOUTS[:1])


def hung_sets(root: Path, plan: HangPlan, part: tuple[int, int]) -> list[Tally]:
    """Hangs, which must be named in time, and healthy jobs with a slow rank, which must not."""
    named = {(own, way): Tally("R2", f"hang of a rank of {own}: {_WAYS[way]}") for own in _SETS for way in _WAYS}
    ended = Tally("R2", f"a job of two sets ends with an exit code within {MOST_ENDING_SECONDS:g} s of its line")
    left_alone = Tally("R2", f"no hang: a rank of two sets is slower by {_SLOW_SECONDS:g} s at a point")
    for index, layout in enumerate(plan.layouts):
        random, folder = Random(index), root / f"{index}"  # noqa: S311 - no secret
        passes = _passes(folder, layout)
        hangs = draw_hangs(layout, passes, plan.share(plan.num_hangs, index), random)
        for number, hang in enumerate(hangs):
            if number % part[1] == part[0]:
                _count(folder / f"hang_{number}", hang, named, ended)
        for number, (rank, point) in enumerate(_slow_places(passes, plan.share(plan.num_healthy, index), random)):
            if number % part[1] == part[0]:
                with left_alone.timed(f"{point} of rank {rank}, {layout}") as problems:
                    problems += _slow(folder / f"healthy_{number}", layout, rank, point)
    return [*(tally for tally in (*named.values(), ended, left_alone) if tally.injected)]


def _passes(folder: Path, layout: Layout) -> Mapping[int, Sequence[Pass]]:
    """What ranks pass in an undisturbed job."""
    jobs = layout.jobs(folder, "rollout.prompts_per_step=4")
    noted = jobs.passes("whole")
    end = jobs.start("whole", prepare=partial(note_passes, noted)).end()
    if not end.is_done:
        raise RuntimeError(f"the undisturbed run of {layout} failed: {end.screen[-2000:]}")
    return {rank: Passes(noted, rank).new() for rank in range(layout.num_ranks)}


def _count(folder: Path, hang: SetHang, named: Mapping[tuple[str, str], Tally], ended: Tally) -> None:
    seen = watch_hang(hang.layout.jobs(folder), hang)
    own = "update" if hang.rank in hang.layout.ranks("update") else "generation"
    named[own, hang.way].count(seen.named_seconds, seen.problem(hang))
    ended.count(seen.ending_seconds, f"{hang}: exit codes {seen.end.codes}" if seen.is_late else None)


def _slow_places(passes: Mapping[int, Sequence[Pass]], count: int, random: Random) -> Iterator[tuple[int, str]]:
    """Random ranks, and points that they pass once or twice in a step."""
    for _ in range(count):
        rank = random.choice(sorted(passes))
        points = [one.point for one in passes[rank] if one.in_step == _HANG_STEPS[0] and one.point not in ("", "step")]
        yield rank, random.choice([one for one in sorted({*points}) if points.count(one) <= _MOST_SLOW_PASSES])


def _slow(folder: Path, layout: Layout, rank: int, point: str) -> list[str]:
    """What is wrong with a job one of whose ranks is slow, if anything is."""
    jobs = layout.jobs(folder, f"resources.stage_timeout_seconds={_LIMIT}", num_steps=_SLOW_STEPS)
    end = jobs.run("run", fault=f"{point}:{rank}:2:slow:{_SLOW_SECONDS}")
    return [] if end.is_done and " hangs: " not in end.screen else [end.screen[-300:]]
