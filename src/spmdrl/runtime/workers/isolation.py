"""Choice between child processes for users' functions and this process, where a debugger works."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Literal

Isolation = Literal["auto", "process", "inline"]


def is_debugged() -> bool:
    """Return True if a debugger runs this process: a trace function is set, or it was started by pdb or debugpy."""
    started_by_debugger = any(flag == "-m" and module in ("pdb", "debugpy") for flag, module in pairwise(sys.orig_argv))
    return sys.gettrace() is not None or started_by_debugger


def runs_inline(isolation: Isolation) -> bool:
    """Return True if calls run in this process: if set so, or under a debugger unless processes are set."""
    return isolation == "inline" or (isolation == "auto" and is_debugged())
