"""The stages of the doctor, in the order in which they run: each relies on the results of earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DOCTOR = "spmdrl.verbs.doctor"


@dataclass(frozen=True)
class Stage:
    """One stage. Without reasons to skip it runs on every kind of device."""

    name: str
    function: str
    """module:function; the function takes a `StageRun`"""
    shows: str
    """guarantee of a passed stage"""
    starts_jobs: bool = False
    """true if it starts whole jobs, rather than being a rank itself"""
    not_on_cpu: str | None = None
    """reason for skipping it there"""
    only_on_cuda: str | None = None
    """reason for skipping it elsewhere"""
    limit_seconds: float = 480.0
    package: str | None = None
    """required package, by its name on the package index"""

    def skipped_on(self, device: Mapping[str, Any]) -> str | None:
        """Return the reason against running on a device with these facts; None if it can."""
        if device["kind"] == "cpu" and self.not_on_cpu:
            return self.not_on_cpu
        if device["kind"] != "cuda" and self.only_on_cuda:
            return self.only_on_cuda
        if self.package is not None and self.package.replace("-", "_") not in device:
            return f"{self.package} is not installed"
        return None


STAGES = (
    Stage("device", f"{_DOCTOR}.device_verbs:check_device", "memory, streams, pinned copies and collectives work"),
    Stage("bfloat16", f"{_DOCTOR}.precision:check_bfloat16", "an update is the CPU's, and in bfloat16 that in float32"),
    Stage(
        "quickstart", f"{_DOCTOR}.whole_jobs:check_quickstart", "a job learns, twice to the same bits", starts_jobs=True
    ),
    Stage(
        "vllm",
        f"{_DOCTOR}.whole_jobs:check_vllm",
        "vLLM sleeps, wakes and takes weights in the job's processes, and rates tokens as the trainer does",
        starts_jobs=True,
        package="vllm",
    ),
)
