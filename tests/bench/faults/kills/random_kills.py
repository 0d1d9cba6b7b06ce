"""Ranks that are killed at random moments, several times in a run, which must end as if nothing had happened."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from random import Random

from spmdrl.observability.jsonl import read_jsonl
from spmdrl.runtime.supervision.activity import BETWEEN
from tests.bench.faults.fault_jobs import FaultJobs, TimedKill, difference, outcome_of
from tests.bench.faults.fault_tally import Tally
from tests.bench.faults.kills.killed_jobs import AfterKill
from tests.bench.faults.noted_passes import NOWHERE, PUSH, Pass, Passes, note_passes

_STEPS = (
    "train.max_steps=10", "checkpoint.interval=2", "checkpoint.keep_last=2", "eval.interval=5",
    # A start-up, which may take three times that, writes its ranks' stacks before the job is ended from outside.
    "resources.stage_timeout_seconds=30",
)  # fmt: skip
_LONG = ("model.make.max_position_embeddings=64", "rollout.max_completion_length=24")
_PARTIAL = (*_LONG, "rollout.partial_max_rounds=3", "rollout.partial_extra_prompts=4", "algo.rollout_is=tis")
_CHARS = "model.make.chars='0123456789+=<>? '"
_RIGHT = """
def begins_low(completions, **columns):
    return [float(text[:1] in ("0", "1", "2")) for text in completions]
"""
_MOST_KILLS_OF_RUN = 5
# Of the kills the rest come before the run's banner.
_SHARE_IN_RUN = 0.8
# Of the kills of ranks that are in sets, and of those in a stage; the rest come at any moment, in which short stages
# hardly ever run.
_SHARE_IN_STAGE = 0.75
_SHARE_IN_PUSH = 1 / 3


@dataclass(frozen=True)
class Kind:
    """What a run does beside plain steps."""

    name: str
    settings: tuple[str, ...]
    sign: str
    """a metric above 0 in some steps that do it"""
    least_ranks: int = 1
    unlike: str = " "
    """pattern of metrics that may differ after a resume"""
    generating: int = 0
    """the number of ranks that only generate, the last ones; 0: all do all"""

    def victims(self, num_ranks: int) -> Mapping[str, Sequence[Sequence[int]]]:
        """What may be killed at once, by its name: one rank, of either set, or all of them."""
        if not self.generating:
            return {"a rank": [[rank] for rank in range(num_ranks)]}
        ranks, num_training = [[rank] for rank in range(num_ranks)], num_ranks - self.generating
        together = [[*range(rank, num_ranks), *range(rank)] for rank in (0, num_training)]
        return {
            "a rank that trains": ranks[:num_training], "a rank that generates": ranks[num_training:],
            "all ranks": together,
        }  # fmt: skip


_KINDS = (
    Kind("plain steps", (), "dock/trained"),
    Kind("partial rollout", _PARTIAL, "dock/deferred"),
    Kind(
        "dynamic sampling",
        ("algo={name: dapo, max_refills: 3}", "reward.functions=[RIGHT:begins_low]"),
        "select/all_wrong",
    ),
    Kind(
        "the calculator's turns", (*_LONG, _CHARS, "environment.function=calculator", "rollout.stop=['=']"),
        "environment/tokens",
    ),
    Kind("asynchronous checkpoints", ("checkpoint.asynchronous=true", "checkpoint.interval=1"), "dock/trained"),
    Kind("partial rollout of a hybrid", (*_PARTIAL, "model.make.model_type=qwen3_5_text"), "dock/deferred"),
    Kind(
        "partial rollout of experts with sinks",
        (*_PARTIAL, "model.make.model_type=gpt_oss", "model.make.sliding_window=6", "model.make.num_experts=4"),
        "dock/deferred",
    ),
    # Rows that a checkpoint brings lie elsewhere than those that were generated.
    Kind(
        "ranks that generate two steps ahead", ("resources.ranks.generation=1", "rollout.lag=2"), "off_policy/max",
        least_ranks=2, unlike="dock/.*bytes", generating=1,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How many kills of which runs."""

    num_kills: int
    seed: int
    num_ranks: Sequence[int] = (1, 2, 4)
    kinds: Sequence[Kind] = _KINDS


KINDS = {kind.name: kind for kind in _KINDS}
PLAN_IF_SHORT = Plan(2, 0, (2,), _KINDS[1:2])


def random_kills(root: Path, plan: Plan, part: tuple[int, int]) -> list[Tally]:
    """Kills in equal shares for each number of ranks and kind of run; a part has some of these."""
    num_kills = plan.num_kills
    cells = [(ranks, kind) for ranks, kind in product(plan.num_ranks, plan.kinds) if ranks >= kind.least_ranks]
    after, tallies, places = AfterKill("at a random moment"), [], Places()
    for index, (num_ranks, kind) in enumerate(cells):
        share = num_kills * (index + 1) // len(cells) - num_kills * index // len(cells)
        if index % part[1] == part[0] and share:
            folder = root / f"{index}"
            folder.mkdir()
            cell = _Cell(folder, num_ranks, kind, Random(f"{plan.seed} {index}"), places)  # noqa: S311
            tallies.append(cell.kill(share, after))
            shutil.rmtree(folder)
    return [*tallies, *places.tallies, *after.tallies]


class Places:
    """Counts kills by what was killed, and the stage that it was in."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], Tally] = {}

    @property
    def tallies(self) -> list[Tally]:
        return [self._tallies[key] for key in sorted(self._tallies)]

    def count(self, victims: str, stage: str, seconds: float, problem: str | None) -> None:
        tally = self._tallies.setdefault((victims, stage), Tally("R1", f"SIGKILL of {victims}, in {stage}"))
        tally.count(seconds, problem)


@dataclass(frozen=True)
class _Killed:
    """A kill that came, and where."""

    kill: TimedKill
    victims: str
    stage: str
    """of the first of them"""

    def __str__(self) -> str:
        return f"{self.victims}, in {self.stage}: {self.kill}"


class _Cell:
    """Runs of one kind on so many ranks."""

    def __init__(self, folder: Path, num_ranks: int, kind: Kind, random: Random, places: Places):
        (folder / "right.py").write_text(_RIGHT)
        settings = [word.replace("RIGHT", str(folder / "right.py")) for word in kind.settings]
        self._jobs = FaultJobs(folder, num_ranks, *_STEPS, *settings)
        self._random = random
        self._kind = kind
        self._places = places
        self._tally = Tally("R1", f"SIGKILL at random moments, {kind.name}, {num_ranks} rank{'s'[: num_ranks > 1]}")
        started = time.perf_counter()
        passes, whole = self._jobs.passes("whole"), folder / "whole"
        end = self._jobs.start("whole", prepare=partial(note_passes, passes)).end()
        metrics = list(read_jsonl(whole / "metrics.jsonl")) if end.is_done else []
        if not any(step.get(kind.sign, 0) > 0 for step in metrics):
            raise RuntimeError(
                f"the undisturbed run of {kind.name} failed, or has no {kind.sign}: {end.screen[-2000:]}"
            )
        self._run_seconds = sum(step["time/step"] for step in metrics)
        self._start_seconds = time.perf_counter() - started - self._run_seconds
        self._outcome = outcome_of(whole, unlike=kind.unlike)
        self._stages = {rank: stages_of(Passes(passes, rank).new()) for rank in range(num_ranks)}

    def kill(self, num_kills: int, after: AfterKill) -> Tally:
        """So many kills in as many runs as they take; a run that ends before its next kill has had fewer."""
        for number in count():
            left = num_kills - self._tally.injected
            if not left:
                return self._tally
            self._run(f"run_{number}", min(left, self._random.randint(3, _MOST_KILLS_OF_RUN)), after)
        raise AssertionError

    def _run(self, name: str, num_kills: int, after: AfterKill) -> None:
        killed, problem, folder = list[_Killed](), "", self._jobs.root / name
        for _ in range(num_kills):
            victims, kill = self._moment(num_kills)
            end = after.run(self._jobs, name, kill=kill)
            if end.is_killed or not end.is_done:
                last = [NOWHERE, *Passes(self._jobs.passes(name), kill.ranks[0]).new()][-1]
                killed.append(_Killed(kill, victims, last.stage))
            if not end.is_killed:
                problem = "" if end.is_done else f"it failed before: {end.screen[-1000:]}"
                break
        started = time.perf_counter()
        end = self._jobs.run(name)
        seconds = time.perf_counter() - started
        problem = problem or ("" if end.is_done else end.screen[-1000:])
        problem = (
            problem
            or difference(self._outcome, outcome_of(folder, unlike=self._kind.unlike))
            or lost_or_doubled(folder)
        )
        for one in killed:
            found = f"{one}: {problem}" if problem else None
            self._tally.count(seconds, found)
            if self._kind.generating:
                self._places.count(one.victims, one.stage, seconds, found)
        if not problem:
            shutil.rmtree(folder)

    def _moment(self, num_kills: int) -> tuple[str, TimedKill]:
        """What is killed, by its name, and when."""
        victims = self._kind.victims(self._jobs.num_ranks)
        name = self._random.choice(list(victims))
        ranks = self._random.choice(victims[name])
        if self._kind.generating and self._random.random() < _SHARE_IN_STAGE:
            stages = self._stages[ranks[0]]
            is_in_push = self._random.random() < _SHARE_IN_PUSH
            stage = PUSH if is_in_push else self._random.choice(sorted({*stages} - {PUSH, BETWEEN}))
            step, seconds = self._random.choice(stages[stage])
            return name, TimedKill(ranks, self._random.uniform(0, seconds), in_run=True, stage=stage, step=step)
        in_run = self._random.random() < _SHARE_IN_RUN
        # So that a run of several kills gets on; one in as many may come anywhere up to the run's end.
        share = 1.0 if self._random.random() < 1 / num_kills else 2 / (num_kills + 1)
        longest = self._run_seconds * share if in_run else self._start_seconds
        return name, TimedKill(ranks, self._random.uniform(0, longest), in_run)


def stages_of(passes: Sequence[Pass]) -> Mapping[str, Sequence[tuple[int, float]]]:
    """By stage, each time that a rank was in it: in which of the run's steps, and for how many seconds."""
    found = defaultdict[str, list[tuple[int, float]]](list)
    ends = [one for one in passes if not one.point]
    for one, following in pairwise(ends):
        found[one.stage].append((one.in_step, following.seconds - one.seconds))
    return found


def lost_or_doubled(run: Path) -> str:
    """Which step has a row twice, or lacks rows that its metrics count; empty where none does."""
    rows: dict[int, list[int]] = {}
    for path in run.glob("rows/rank_*.jsonl"):
        for record in read_jsonl(path):
            rows.setdefault(record["step"], []).extend(record.get("rows", ()))
    for step in read_jsonl(run / "metrics.jsonl"):
        of_step = rows.pop(int(step["step"]), [])
        if len(of_step) != len(set(of_step)):
            return f"step {step['step']} has a row twice"
        if len(of_step) < step["dock/trained"]:
            return f"step {step['step']} lacks rows: {len(of_step)} of {step['dock/trained']:g}"
    return f"rows of no step: {sorted(rows)}" if rows else ""
