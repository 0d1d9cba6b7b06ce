"""Conversion of out-of-memory errors, on a device or a host, to one line: the stage, and the keys to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from spmdrl.nouns.roles import WorkerState
from spmdrl.nouns.settings.role_configs import JudgeConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.observability.terminal.units import bytes_text
from spmdrl.observability.timeline import HeldMemory, Timeline
from spmdrl.resources.memory import is_out_of_memory

_TRAINING = tuple(state.value for state in WorkerState if state.uses_training_engine)
_GENERATION = (WorkerState.GENERATION.value, "evaluation")


class OutOfMemory(RuntimeError):
    """An allocator had no more memory; the message is one line with a way out."""


class Whereabouts(Protocol):
    """A run's facts at the moment of running out of memory."""

    @property
    def timeline(self) -> Timeline | None:
        """Timeline with the failed stage and the memory held before it; None before the run has begun."""

    def lower_limit(self) -> str:
        """Let the next attempt begin with fewer tokens per micro-batch, if that may help; returns a description."""


@contextmanager
def explained_memory(
    rollout: RolloutConfig, train: TrainingConfig, where: Whereabouts | None = None, judge: JudgeConfig | None = None
) -> Iterator[None]:
    """Raise OutOfMemory in place of an allocator's error; `where` is None for a verb that only generates."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        timeline = where.timeline if where else None
        stage = timeline.failed_stage if timeline else None if where else WorkerState.GENERATION.value
        what = f"stage {stage}" if stage else "setting up the run"
        words = (str(error) or "no more memory").splitlines()[0]
        if judge is not None and stage == WorkerState.JUDGE.value:
            advice = f"lower reward.judge.kv_cache_gib ({judge.kv_cache_gib}), or use a smaller judge"
        else:
            advice = _advice(rollout, train, stage)
        next_time = where.lower_limit() if where and stage in _TRAINING else ""
        held = _ledger_text(timeline.held if timeline else None)
        raise OutOfMemory(f"{what} needs more memory than there is: {advice}{next_time} ({words}){held}") from error


def _ledger_text(held: HeldMemory | None) -> str:
    """List the owners of device memory, largest first."""
    sizes = sorted(held.device.items(), key=lambda item: -item[1]) if held is not None else []
    texts = [f"{owner} {bytes_text(size)}" for owner, size in sizes if size]
    return f"; it held {', '.join(texts)}" if texts else ""


def _advice(rollout: RolloutConfig, train: TrainingConfig, stage: str | None) -> str:
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
