"""Record of a run's failure in its folder; out of memory becomes one line: the stage, and the keys to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmdrl.config.config import Config
from spmdrl.job.run.outcome import write_early_end
from spmdrl.job.run.run import Run
from spmdrl.nouns.roles import WorkerState
from spmdrl.observability.summary import read_summary
from spmdrl.observability.terminal.units import bytes_text
from spmdrl.observability.timeline import HeldMemory
from spmdrl.resources.memory import is_out_of_memory
from spmdrl.runtime.supervision.ending import FirstFailure
from spmdrl.runtime.supervision.fence import loss_of_folder
from spmdrl.runtime.supervision.stop_request import Stopped

_TRAINING = tuple(state.value for state in WorkerState if state.uses_training_engine)
_GENERATION = (WorkerState.GENERATION.value, "evaluation")


class OutOfMemory(RuntimeError):
    """An allocator had no more memory; the message is one line with a way out."""


@contextmanager
def recording_failure(run: Run) -> Iterator[None]:
    """Record an exception in summary and report, then re-raise it, explained."""
    try:
        with explained_memory(run.checked.config, run):
            yield
    except BaseException as failure:
        if isinstance(failure, Stopped) and failure.is_agreed:
            raise
        # Published at once, before the slower report.
        first = run.world.first_failure(failure)
        if run.has_begun:
            run.checkpoints.finish_alone()
        end = run.end(first)
        run.console.close()
        # If a newer job has the folder, nothing is written into it.
        if run.has_begun and _writes_end_after(run, first) and not loss_of_folder(first.cause):
            write_early_end(run.folder, end.verdict, end.line)
        if isinstance(failure, Stopped) and first.is_stop:
            raise Stopped(failure.reason, end.line, is_agreed=False) from failure
        raise


def _writes_end_after(run: Run, first: FirstFailure) -> bool:
    """Return True if this rank writes the end of the run: rank 0, or rank 1 if that one's process is gone."""
    if first.rank == 0 and first.is_death:
        return run.world.rank == 1 and read_summary(run.folder).get("verdict") == "running"
    return run.world.is_main


@contextmanager
def explained_memory(config: Config, run: Run | None = None) -> Iterator[None]:
    """Raise OutOfMemory in place of an allocator's error; `run` is None for a verb that only generates."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        timeline, judge = run and run.timeline, config.reward.judge
        stage = timeline.failed_stage if timeline else None if run else WorkerState.GENERATION.value
        what = f"stage {stage}" if stage else "setting up the run"
        words = (str(error) or "no more memory").splitlines()[0]
        if judge is not None and stage == WorkerState.JUDGE.value:
            advice = f"lower reward.judge.kv_cache_gib ({judge.kv_cache_gib}), or use a smaller judge"
        else:
            advice = _advice(config, stage)
        next_time = run.lower_limit() if run and stage in _TRAINING else ""
        held = _ledger_text(timeline.held if timeline else None)
        raise OutOfMemory(f"{what} needs more memory than is available: {advice}{next_time} ({words}){held}") from error


def _ledger_text(held: HeldMemory | None) -> str:
    """List the owners of device memory, largest first."""
    sizes = sorted(held.device.items(), key=lambda item: -item[1]) if held is not None else []
    texts = [f"{owner} {bytes_text(size)}" for owner, size in sizes if size]
    return f"; it held {', '.join(texts)}" if texts else ""


def _advice(config: Config, stage: str | None) -> str:
    rollout, train = config.rollout, config.train
    cache = (
        f"rollout.kv_cache_gib ({rollout.kv_cache_gib})"
        if rollout.kv_cache_gib is not None
        else f"rollout.gpu_memory_utilization ({rollout.gpu_memory_utilization})"
    )
    shards = "shard the training state over more ranks (resources.update.shard)"
    if stage in _GENERATION:
        return f"lower {cache} or rollout.max_running_rows ({rollout.max_running_rows})"
    if stage in _TRAINING:
        tokens = "auto" if train.max_tokens_per_microbatch is None else train.max_tokens_per_microbatch
        recompute = "" if train.activation_checkpointing == "full" else ", set train.activation_checkpointing to full"
        return f"lower train.max_tokens_per_microbatch ({tokens}){recompute}, or {shards}"
    return f"lower {cache}, {shards}, or use a smaller model"
