"""Faults on purpose: a hook at the product's fault points, by which a variable of the environment makes a rank fail.

    SPMDRL_FAULT=forward:1:3:sigkill torchrun --nproc-per-node 2 -m tests.bench.faults.planned_faults train run.yaml

SPMDRL_FAULT=stage:rank:step:kind[:arg], for example `forward:1:3:sigkill` or `checkpoint.rename:0:2:enospc`. Only the
first attempt of a job has the fault, so that one that is restarted goes on. Steps count from 1; what comes before the
first one is step 0. `arg` is how often that step passes the point before the fault comes, by default 0; of `slow`, it
is the seconds by which the point is slower from that step on.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.observability import fault_points
from spmdrl.observability.terminal.spelling import nearest
from spmdrl.runtime.screen import show

VARIABLE = "SPMDRL_FAULT"
MODULE = "tests.bench.faults.planned_faults"
"""the command line with the fault that the variable names, for jobs that start as commands"""
_FORM = f"{VARIABLE}=stage:rank:step:kind[:arg]"
ANYWHERE = ("sigkill", "sigterm", "exit", "raise", "hang", "slow")
"""Kinds that every point has."""
POINTS: Mapping[str, tuple[str, ...]] = {
    "init": (),
    "load": (),
    "data": (),
    "reshard": ("corrupt",),
    "generate": ("oom",),
    "environment.answer": (),
    "environment.record": (),
    "dock.put": (),
    "dock.get": (),
    "reward": ("nan",),
    "score": ("oom",),
    "logprob": ("nan",),
    "advantage": ("nan",),
    "forward": ("oom", "nan"),
    "backward": ("oom",),
    "optim": ("nan",),
    "checkpoint.write": ("enospc", "corrupt"),
    "checkpoint.fsync": ("enospc",),
    "checkpoint.rename": ("enospc",),
    "eval": (),
    "shutdown": (),
}
"""By point, the kinds that it has beside those."""


@dataclass(frozen=True)
class PlannedFault:
    """What is to go wrong, where and when."""

    stage: str
    rank: int
    step: int
    kind: str
    arg: float

    @property
    def text(self) -> str:
        return f"{self.kind} at {self.stage} in step {self.step} of rank {self.rank}"


def parse_fault(text: str, world_size: int) -> PlannedFault:
    """Raises ValueError, with the words that there are, for anything but a fault of a job of so many ranks."""
    stage, rank, step, kind, arg = [*text.split(":"), *[""] * 5][:5]
    if stage not in POINTS:
        near = nearest(stage, POINTS)
        advice = f"did you mean {near}? " if near else ""
        raise ValueError(f"{VARIABLE} is {text!r}, but {stage!r} is no stage; {advice}there are {', '.join(POINTS)}")
    kinds = (*ANYWHERE, *POINTS[stage])
    if kind not in kinds:
        raise ValueError(f"{VARIABLE} is {text!r}, but {stage} has no fault {kind!r}; it has {', '.join(kinds)}")
    if not (rank.isdecimal() and int(rank) < world_size and step.isdecimal()):
        raise ValueError(
            f"{VARIABLE} is {text!r}, but rank and step must be whole numbers, and the rank one of this job's 0 to "
            f"{world_size - 1}; write {_FORM}"
        )
    is_number = arg.replace(".", "", kind == "slow").isdecimal()
    if text.count(":") > 4 or not (arg == "" or is_number):
        raise ValueError(f"{VARIABLE} is {text!r}, but {arg!r} isn't a number, at the end of the text; write {_FORM}")
    return PlannedFault(stage, int(rank), int(step), kind, float(arg or (kind == "slow")))


class FaultHook:
    """Has a fault come at its point in its step, once, or with `slow` from then on."""

    def __init__(self, fault: PlannedFault):
        self._fault = fault
        self._is_over = False
        self._times_passed = 0
        self._step = 0
        self._own = threading.local()
        """`step` of a thread that isn't where the main thread is"""

    def __call__(self, stage: str, *values: Any) -> None:
        fault, step = self._fault, getattr(self._own, "step", self._step)
        if stage == "step":
            self._begin_step(*values)
        elif self._is_over or stage != fault.stage or step < fault.step:
            return
        elif fault.kind == "slow":
            time.sleep(fault.arg)
        elif step == fault.step:
            self._times_passed += 1
            if self._times_passed > fault.arg:
                self._is_over = True
                show(f"spmdrl: {VARIABLE}: {fault.text} comes now", stream=sys.stderr)
                _strike(fault.kind, values)

    def _begin_step(self, step: int) -> None:
        if threading.current_thread() is threading.main_thread():
            self._step = step
        else:
            self._own.step = step


def arm_fault(environ: Mapping[str, str]) -> None:
    """Set the hook for the fault that the environment names, if it is this rank's and the job's first attempt.

    Rank 0 shows a line, whichever rank is meant. Raises ValueError for a variable that names no fault.
    """
    fault_points.hook = None
    text = environ.get(VARIABLE, "")
    if not text:
        return
    rank = int(environ.get("RANK", "0"))
    fault = parse_fault(text, int(environ.get("WORLD_SIZE", "1")))
    if environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if rank == 0:
        show(f"spmdrl: {VARIABLE} is set: {fault.text}, on purpose", stream=sys.stderr)
    if rank == fault.rank:
        fault_points.hook = FaultHook(fault)


def _strike(kind: str, values: tuple[Any, ...]) -> None:
    if kind in ("sigkill", "sigterm"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "sigkill" else signal.SIGTERM)
    elif kind == "exit":
        os._exit(1)
    elif kind == "raise":
        raise RuntimeError(f"raised on purpose by {VARIABLE}")
    elif kind == "hang":
        while True:
            time.sleep(1.0)
    elif kind == "oom":
        # In the words of PyTorch's allocator for CPUs.
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: refused on purpose by {VARIABLE}")
    elif kind == "enospc":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, on purpose by {VARIABLE}")
    else:
        for value in values:
            _spoil(value, kind)


def _spoil(value: Any, kind: str) -> None:
    """Flip a bit in the middle of a file or tensor, or make a tensor's first element NaN."""
    if isinstance(value, Path):
        content = bytearray(value.read_bytes())
        content[len(content) // 2] ^= 1
        value.write_bytes(content)
        return
    # Autograd isn't to see it.
    flat = value.detach().view(-1)
    if not flat.numel():
        return
    if kind == "nan" and value.is_floating_point():
        flat[0] = float("nan")
    elif kind == "corrupt":
        octets = flat.view(value.new_zeros(0).byte().dtype)
        octets[len(octets) // 2] ^= 1


if __name__ == "__main__":
    from spmdrl.cli.command_line import main

    arm_fault(os.environ)
    raise SystemExit(main())
