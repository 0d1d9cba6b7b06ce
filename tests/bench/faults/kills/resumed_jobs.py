"""Jobs that go on from a checkpoint, on as many ranks or on fewer, and end as if they had never stopped."""

from __future__ import annotations

from pathlib import Path

from spmdrl.observability.jsonl import read_jsonl
from tests.bench.faults.fault_jobs import FaultJobs, difference, outcome_of
from tests.bench.faults.fault_tally import Tally

_RESUMED_STEPS = 20
_RESUMED_STEPS_IF_SHORT = 3
_STOPS = (1, 7, 10, 19)
_MOST_DIFFERENCE = 1e-6
# Responses that go on in a later step are then part of what a checkpoint holds.
_PARTIAL = ("rollout.partial_max_rounds=3", "rollout.partial_extra_prompts=4")


def resumed(root: Path, *, is_short: bool) -> list[Tally]:
    """k + (20 - k) steps against 20, with responses that take several steps; 1, 2 and 4 ranks."""
    tallies = []
    for num_ranks in (1,) if is_short else (1, 2, 4):
        folder = root / f"ranks_{num_ranks}"
        folder.mkdir()
        num_steps = _RESUMED_STEPS_IF_SHORT if is_short else _RESUMED_STEPS
        jobs = FaultJobs(folder, num_ranks, *_PARTIAL, f"train.max_steps={num_steps}")
        if not jobs.run("whole").is_done:
            raise RuntimeError(f"the undisturbed run failed: {folder / 'whole.screen'}")
        whole, tally = outcome_of(folder / "whole"), Tally("R5", f"k + ({num_steps} - k) steps on {num_ranks} ranks")
        for stop in _STOPS[:1] if is_short else _STOPS:
            with tally.timed(f"stopped after step {stop}") as problems:
                jobs.run(f"stopped_{stop}", fault=f"data:{num_ranks - 1}:{stop + 1}:exit")
                again = jobs.run(f"stopped_{stop}")
                is_resumed = f"after step {stop}" in again.screen
                problem = difference(whole, outcome_of(folder / f"stopped_{stop}")) if again.is_done else again.screen
                problems += [problem] if problem else ([] if is_resumed else ["it began anew"])
        tallies.append(tally)
    return tallies


def fewer_ranks(root: Path, *, is_short: bool) -> list[Tally]:
    """A run begins on 4 ranks and goes on with 2 and then 1: the same prompts in the same order, the same losses."""
    worlds, num_steps, cases = ((2, 1), 3, ((1,),)) if is_short else ((4, 2, 1), 6, ((1, 2), (2, 4), (3, 5)))
    way, folder = " -> ".join(map(str, worlds)), root / "fewer"
    tally = Tally("R5", f"{way} ranks: prompts in the same order, losses within 1e-6")
    folder.mkdir()
    steps = (f"train.max_steps={num_steps}", "log.samples_per_step=1000")
    *earlier, last = jobs = [FaultJobs(folder, num_ranks, *steps) for num_ranks in worlds]
    if not jobs[0].run("whole").is_done:
        raise RuntimeError(f"the undisturbed run failed: {folder / 'whole.screen'}")
    for stops in cases:
        name = "_".join(map(str, ("parts", *stops)))
        with tally.timed(f"fewer after steps {stops}") as problems:
            for part, stop in zip(earlier, stops, strict=True):
                part.run(name, fault=f"data:{part.num_ranks - 1}:{stop + 1}:exit")
            end = last.run(name)
            is_resumed = f"after step {stops[-1]}" in end.screen
            problems += [] if is_resumed else [f"it didn't go on: {end.screen[-400:]}"]
            problems += (
                [] if end.is_done and _learned_alike(folder / "whole", folder / name) else ["it learned another"]
            )
    return [tally]


def _learned_alike(whole: Path, other: Path) -> bool:
    losses = [[step["loss"] for step in read_jsonl(run / "metrics.jsonl")] for run in (whole, other)]
    are_close = all(abs(one - two) <= _MOST_DIFFERENCE for one, two in zip(*losses, strict=True))
    rows = [
        sorted((row["step"], row["row"], row["prompt"]) for row in read_jsonl(run / "samples.jsonl"))
        for run in (whole, other)
    ]
    return are_close and rows[0] == rows[1]
