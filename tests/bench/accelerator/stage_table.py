"""The stages in the order in which they run: each builds on what the ones before it have shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STAGES = "tests.bench.accelerator.stages"


@dataclass(frozen=True)
class Stage:
    """One stage. Without reasons to skip it runs on every kind of device."""

    name: str
    function: str
    """module:function; the function takes a `StageRun`"""
    shows: str
    """what has been shown once it passed"""
    starts_jobs: bool = False
    """whether it starts whole jobs, rather than being a rank itself"""
    not_on_cpu: str | None = None
    """why it is skipped there"""
    only_on_cuda: str | None = None
    """why it is skipped elsewhere"""
    limit_seconds: float = 480.0
    package: str | None = None
    """what must be installed for it, by its name on the package index"""

    def skipped_on(self, device: Mapping[str, Any]) -> str | None:
        """Why it can't run on a device with these facts; None if it can."""
        if device["kind"] == "cpu" and self.not_on_cpu:
            return self.not_on_cpu
        if device["kind"] != "cuda" and self.only_on_cuda:
            return self.only_on_cuda
        if self.package is not None and self.package.replace("-", "_") not in device:
            return f"{self.package} is not installed"
        return None


STAGES = (
    Stage("device", f"{_STAGES}.device_verbs:check_device", "memory, streams, pinned copies and collectives work"),
    Stage(
        "kernels", f"{_STAGES}.kernel_parity:check_kernels", "each operation of the kernel table computes the plain one"
    ),
    Stage("packed_attention", f"{_STAGES}.attention_parity:check_packed_attention", "rows attend to themselves alone"),
    Stage(
        "ring_attention", f"{_STAGES}.attention_parity:check_ring_attention", "attention in parts is that of the whole"
    ),
    Stage(
        "quickstart", f"{_STAGES}.whole_jobs:check_quickstart", "a job learns, twice to the same bits", starts_jobs=True
    ),
    Stage("bfloat16", f"{_STAGES}.precision:check_bfloat16", "an update in bfloat16 is that in float32"),
    Stage(
        "graphs",
        f"{_STAGES}.graph_parity:check_graphs",
        "decoding steps as graphs draw what plain ones draw",
        only_on_cuda="graphs are captured on CUDA only",
    ),
    Stage(
        "swap",
        f"{_STAGES}.swap_speed:check_swap",
        "training state leaves and comes back whole, as fast as pinned copies",
        not_on_cpu="a CPU's training state goes to a file; `python -m tests.bench swap` times it",
    ),
    Stage(
        "ledger",
        f"{_STAGES}.memory_accounts:check_ledger",
        "the ledger holds what the allocator holds",
        not_on_cpu="a CPU has no allocator that counts; `python -m tests.bench memory` watches resident memory",
    ),
    Stage(
        "switch_peak",
        f"{_STAGES}.memory_accounts:check_switch_peak",
        "a switch needs about the larger of the two states",
        not_on_cpu="a CPU has no allocator that counts; `python -m tests.bench memory` watches resident memory",
    ),
    Stage("decode", f"{_STAGES}.decoding:check_decode_speed", "decoding is bound by reading weights and cache"),
    Stage("update", f"{_STAGES}.update_speed:check_update_speed", "an update is bound by its matrix products"),
    Stage("step", f"{_STAGES}.whole_jobs:check_step", "where the time of a step goes", starts_jobs=True),
    Stage(
        "vllm",
        f"{_STAGES}.whole_jobs:check_vllm",
        "vLLM sleeps, wakes and takes weights in the job's processes, and rates tokens as the trainer does",
        starts_jobs=True,
        package="vllm",
    ),
    Stage(
        "liger",
        f"{_STAGES}.kernel_parity:check_liger",
        "liger-kernel's operations compute what PyTorch's do",
        only_on_cuda="liger-kernel is used on CUDA only",
        package="liger-kernel",
    ),
)
