"""Memory that runs out, values that aren't finite and full disks cost a job no more than what they spoil."""

from __future__ import annotations

import math
from pathlib import Path

from spmdrl.observability.jsonl import read_jsonl
from tests.bench.faults.fault_jobs import FaultJobs, JobEnd, trainer_digests
from tests.bench.faults.fault_tally import Tally

_FIGURES = ("loss", "grad_norm", "reward", "entropy", "dock/trained", "update/skipped")
_TOLERANCE = 1e-5
_SMALL = "train.max_tokens_per_microbatch=128"


def memory(root: Path, *, is_short: bool) -> list[Tally]:
    """An allocator refuses in every pass; the figures must be those of the undisturbed run but for rounding."""
    redone = Tally("R6", "out of memory in a pass, done again by all ranks")
    stopped = Tally("R6", "out of memory where ranks can't stay in step, then the same command")
    for num_ranks in (1,) if is_short else (1, 2):
        folder = root / f"memory_{num_ranks}"
        folder.mkdir()
        jobs = FaultJobs(folder, num_ranks, _SMALL)
        jobs.run("whole")
        for rank in {0, num_ranks - 1}:
            for stage in ("forward",) if is_short else ("forward", "backward", "score"):
                tally = stopped if stage == "backward" and num_ranks > 1 else redone
                with tally.timed(f"{stage} of rank {rank} of {num_ranks}") as problems:
                    name = f"{stage}_{rank}"
                    end = jobs.run(name, fault=f"{stage}:{rank}:2:oom:1")
                    problems += _problems(jobs, name, end, is_redone=tally is redone)
    return [redone] if is_short else [redone, stopped]


def _problems(jobs: FaultJobs, name: str, end: JobEnd, *, is_redone: bool) -> list[str]:
    if is_redone and not (end.is_done and "the pass is done again" in end.screen):
        return [f"it was not done again: {end.screen[-400:]}"]
    if not is_redone:
        if end.is_done or "the same command goes on with 64" not in end.screen:
            return [f"it didn't stop with a way out: {end.screen[-400:]}"]
        end = jobs.run(name)
    return [] if end.is_done and _alike(jobs.root / "whole", jobs.root / name) else ["other figures"]


def _alike(whole: Path, other: Path) -> bool:
    pairs = zip(*(read_jsonl(run / "metrics.jsonl") for run in (whole, other)), strict=True)
    return all(math.isclose(one[key], two[key], abs_tol=_TOLERANCE) for one, two in pairs for key in _FIGURES)


def values(root: Path, *, is_short: bool) -> list[Tally]:
    """NaN on one rank: all ranks skip the update, or leave the row out, and keep every bit of weights and optimizer."""
    skipped = Tally("R9", "NaN in loss, gradient, log-prob or advantage of one rank")
    left_out = Tally("R9", "NaN as a reward")
    jobs = FaultJobs(root, 2)
    for rank in (1,) if is_short else (0, 1):
        for stage in ("advantage",) if is_short else ("forward", "optim", "logprob", "advantage"):
            with skipped.timed(f"{stage} of rank {rank}") as problems:
                # With one update, and where log-probs are needed with two on the same rows, the step changes nothing.
                epochs = 2 if stage in ("logprob", "advantage") else 1
                name = f"nan_{stage}_{rank}"
                end = jobs.run(name, f"train.epochs_per_step={epochs}", fault=f"{stage}:{rank}:2:nan")
                before, after = (trainer_digests(root / name, step) for step in (1, 2))
                is_kept = any((root / name / "skipped").rglob(f"rank_{rank:05d}.safetensors"))
                if not (end.is_done and before == after and is_kept):
                    problems.append(f"done {end.is_done}, bits kept {before == after}, batch kept {is_kept}")
        if not is_short:
            with left_out.timed(f"rank {rank}") as problems:
                end = jobs.run(f"nan_reward_{rank}", fault=f"reward:{rank}:2:nan")
                dropped = [step["dock/dropped"] for step in read_jsonl(root / f"nan_reward_{rank}/metrics.jsonl")]
                problems += [] if end.is_done and dropped == [0, 1, 0] else [f"dropped {dropped}"]
    return [skipped] if is_short else [skipped, left_out]


def full_disk(root: Path) -> list[Tally]:
    """A checkpoint that the disk refuses, on either rank: the earlier one stays, and training goes on."""
    tally, jobs = Tally("R10", "no space in a checkpoint of a job of two ranks"), FaultJobs(root, 2)
    for rank, stage in ((0, "checkpoint.write"), (1, "checkpoint.write"), (1, "checkpoint.fsync")):
        with tally.timed(f"{stage} of rank {rank}") as problems:
            name = f"full_{stage}_{rank}"
            end = jobs.run(name, fault=f"{stage}:{rank}:2:enospc")
            folders = sorted(path.name for path in (root / name / "checkpoints").iterdir())
            is_said = end.screen.count("WARNING: checkpoint of step 2 FAILED") == 1
            if not (end.is_done and is_said and folders == ["step_000001", "step_000003"]):
                problems.append(f"done {end.is_done}, said {is_said}, left {folders}")
    return [tally]


def weights(root: Path) -> list[Tally]:
    """A bit of what a generator received flips: no token is generated with it."""
    tally, jobs = Tally("R13", "flipped bits in a generator's weights (reshard.verify)"), FaultJobs(root, 2)
    for rank in (0, 1):
        with tally.timed(f"rank {rank}") as problems:
            end = jobs.run(f"flipped_{rank}", "reshard.verify=true", fault=f"reshard:{rank}:2:corrupt")
            if end.is_done or "generation weights differ from the trainer's" not in end.screen:
                problems.append(f"it was not refused: {end.screen[-400:]}")
    return [tally]
