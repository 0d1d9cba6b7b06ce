"""Faults on purpose: named points in the code, at one of which a variable of the environment makes a rank fail.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.observability.terminal.screen import show
from spmdrl.observability.terminal.spelling import nearest

VARIABLE = "SPMDRL_FAULT"
_FORM = f"{VARIABLE}=stage:rank:step:kind[:arg]"
ANYWHERE = ("sigkill", "sigterm", "exit", "raise", "hang", "slow")
"""Kinds that every point has."""
POINTS: Mapping[str, tuple[str, ...]] = {
    "init": (),
    "load": (),
    "data": (),
    "reshard": ("corrupt",),
    "generate": ("oom",),
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


_armed: PlannedFault | None = None
_step = 0
_times_passed = 0
_own = threading.local()
"""`step` of a thread that isn't where the others are"""


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


def arm_fault(environ: Mapping[str, str], rank: int, world_size: int) -> None:
    """Arm the fault that the environment names, if it is this rank's and this is the job's first attempt.

    Rank 0 shows a line, whichever rank is meant. Raises ValueError for a variable that names no fault.
    """
    global _armed, _times_passed
    _armed, _times_passed = None, 0
    text = environ.get(VARIABLE, "")
    if not text:
        return
    fault = parse_fault(text, world_size)
    if environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if rank == 0:
        show(f"spmdrl: {VARIABLE} is set: {fault.text}, on purpose", stream=sys.stderr)
    _armed = fault if fault.rank == rank else None


def at_step(step: int) -> None:
    """What comes from here on belongs to this step."""
    global _step
    _step = step


@contextmanager
def in_step(step: int) -> Iterator[None]:
    """What this thread does in the block belongs to this step, whichever one the others are at."""
    _own.step = step
    try:
        yield
    finally:
        del _own.step


def faultpoint(stage: str, *values: Any) -> None:
    """A place where this rank may fail on purpose; nothing happens unless this very point is armed.

    `values` are what it spoils: tensors, or the path of a file.
    """
    if _armed is not None:
        _pass(_armed, stage, values)


def _pass(fault: PlannedFault, stage: str, values: tuple[Any, ...]) -> None:
    global _armed, _times_passed
    step = getattr(_own, "step", _step)
    if stage != fault.stage or step < fault.step or (step > fault.step and fault.kind != "slow"):
        return
    if fault.kind == "slow":
        time.sleep(fault.arg)
        return
    _times_passed += 1
    if _times_passed > fault.arg:
        _armed = None
        show(f"spmdrl: {VARIABLE}: {fault.text} comes now", stream=sys.stderr)
        _strike(fault.kind, values)


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
