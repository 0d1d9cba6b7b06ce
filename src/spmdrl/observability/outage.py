"""Writes that must not end a run: failures of a disk give a warning and are counted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from spmdrl.runtime.screen import show

_num_refused = 0


def warn(text: str) -> None:
    """Print a warning on stderr."""
    show(f"WARNING: {text}", stream=sys.stderr)


def count_refused() -> None:
    """Count a write of this process that a disk or a logging service refused."""
    global _num_refused
    _num_refused += 1


def take_num_refused() -> int:
    """Return the number of writes that were refused since the last call."""
    global _num_refused
    count, _num_refused = _num_refused, 0
    return count


@contextlib.contextmanager
def best_effort(what: str, failures: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Turn failures of the disk in this block into a warning that `what` could not be written."""
    try:
        yield
    except failures as failure:
        count_refused()
        warn(f"{what} could not be written, the run goes on without it: {type(failure).__name__}: {failure}")
