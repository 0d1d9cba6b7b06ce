"""Turns running out of memory, on a device or a host, into one line: in which stage, and which keys to lower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from spmdrl.engines.generation.rollout_config import RolloutConfig
from spmdrl.engines.reward.judge_config import JudgeConfig
from spmdrl.engines.training.training_engine import TrainingConfig
from spmdrl.types.roles import WorkerState

# What allocators write, beside torch's own type: the CPU's, CUDA's and NPU's runtimes, cuBLAS, NumPy.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "Unable to allocate")
_TRAINING = tuple(state.value for state in WorkerState if state.uses_training_engine)
_GENERATION = (WorkerState.GENERATION.value, "evaluation")


class OutOfMemory(RuntimeError):
    """An allocator had no more memory; the message is one line with a way out."""


@contextmanager
def explained_memory(
    rollout: RolloutConfig, train: TrainingConfig, stage: Callable[[], str | None], judge: JudgeConfig | None = None
) -> Iterator[None]:
    """Raise OutOfMemory in place of an allocator's error; `stage` names where it came from, None before the first."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        where = stage()
        what = f"stage {where}" if where else "setting up the run"
        words = (str(error) or "no more memory").splitlines()[0]
        if judge is not None and where == WorkerState.JUDGE.value:
            advice = f"lower reward.judge.kv_cache_gib ({judge.kv_cache_gib}), or use a smaller judge"
        else:
            advice = _advice(rollout, train, where)
        raise OutOfMemory(f"{what} needs more memory than there is: {advice} ({words})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised this, rather than one of our own buffers, whose error has a way out already."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return (isinstance(error, MemoryError) and not text) or any(word in text for word in _WORDS)


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
