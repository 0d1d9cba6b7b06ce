"""Ways in which a rank stands still that no fault point has, begun where a stage begins."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Literal

import torch

from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.activity import Activity, activity

Way = Literal["sigstop", "lock", "collective"]
"""stopped by a signal; holding Python's lock in C; in a collective that no other rank enters"""
# Three looks of a watch whose limit is 4 s.
_LOOKS_SECONDS = 0.6
COMES = "comes now"
"""in the line that a fault shows when it comes"""


class Standing(Activity):
    """Never gets further in its main thread than the beginning of a stage."""

    way: Way = "sigstop"
    place = ("", 0)
    """the stage, and its step"""

    def _pass(self, stage: str, step: int) -> None:
        super()._pass(stage, step)
        if (stage, step) == self.place:
            # What a rank last was at is known from its lines, which come more often than real stages end.
            time.sleep(_LOOKS_SECONDS)
            show(f"{self.way} in {stage} of step {step} {COMES}", stream=sys.stderr)
            _stand_still(self.way)


def stand_still(way: Way, rank: int, stage: str, step: int) -> None:
    """Have this process stand still there, if it is that rank."""
    if os.environ.get("RANK", "0") == str(rank):
        Standing.way, Standing.place = way, (stage, step)
        activity.__class__ = Standing


def _stand_still(way: Way) -> None:
    if way == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif way == "lock":
        ctypes.PyDLL(None).sleep(3600)
    else:
        torch.distributed.new_group()
