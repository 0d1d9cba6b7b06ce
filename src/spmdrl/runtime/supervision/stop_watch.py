"""A thread per rank that spreads requests to stop: what one rank was asked, all find in the job's store."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

import torch.distributed as dist

from spmdrl.runtime.supervision.stop_request import request, stop_reason

_KEY = "stop"
_POLL_SECONDS = 0.5
# Beyond so many ranks each looks less often: all of them read from rank 0.
_RANKS_PER_POLL = 500
_SLURM_END = "SLURM_JOB_END_TIME"
_SLURM_START = "SLURM_JOB_START_TIME"
_SQUEUE_SECONDS = 10.0
_MARGIN_SECONDS = 120.0
_MARGIN_SHARE = 0.1


@dataclass(frozen=True)
class Deadline:
    """When a job stops by itself."""

    time: float
    """by `time.time`"""
    reason: str


def deadline_of(save_by_seconds: float | None, environ: Mapping[str, str]) -> Deadline | None:
    """When to save and leave: so long after now, else two minutes before Slurm ends the job.

    A tenth of the job's time before, where that is less.
    """
    now = time.time()
    if save_by_seconds is not None:
        return Deadline(now + save_by_seconds, "checkpoint.save_by")
    if not environ.get(_SLURM_END, "").isdecimal():
        return None
    end = float(environ[_SLURM_END])
    start = float(environ[_SLURM_START]) if environ.get(_SLURM_START, "").isdecimal() else now
    margin = max(0.0, min(_MARGIN_SECONDS, _MARGIN_SHARE * (end - start)))
    return Deadline(end - margin, "Slurm's time limit")


def with_end_of_job(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment, with the end of this Slurm job from squeue where its Slurm is too old to export that."""
    squeue = shutil.which("squeue", path=environ.get("PATH"))
    if _SLURM_END in environ or "SLURM_JOB_ID" not in environ or squeue is None:
        return environ
    command = [squeue, "--noheader", f"--jobs={environ['SLURM_JOB_ID']}", "--format=%e"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(
            command, env={**environ, "SLURM_TIME_FORMAT": "standard"}, capture_output=True, text=True,
            timeout=_SQUEUE_SECONDS, check=True,
        )  # fmt: skip
        # In local time; a job without a limit has none.
        end = datetime.fromisoformat(done.stdout.strip()).timestamp()
        return {**environ, _SLURM_END: f"{end:.0f}"}
    return environ


class StopWatch:
    """Looks at the clock and the store, and publishes there what this rank was asked."""

    def __init__(self, store: dist.Store | None, rank: int, size: int, deadline: Deadline | None):
        """Without a store, as in a job of one rank, only the clock counts."""
        self._store = store
        self._rank = rank
        self._deadline = deadline
        self._seconds = _POLL_SECONDS * max(1.0, size / _RANKS_PER_POLL)
        self._ended = threading.Event()
        self._is_published = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch within the block. An end that has passed already is known before its first step."""
        self._look_at_clock()
        thread = threading.Thread(target=self._run, name="stop-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            # The store may never answer.
            thread.join(1.0)

    def _run(self) -> None:
        # Rank 0, which keeps the store, may have ended.
        with suppress(RuntimeError):
            while not self._ended.wait(self._seconds):
                self._look()
            # A rank that is set up leaves at once, and the others may be anywhere.
            self._publish()

    def _look_at_clock(self) -> None:
        if self._deadline is not None and time.time() >= self._deadline.time:
            request.note(self._deadline.reason)

    def _look(self) -> None:
        self._look_at_clock()
        self._publish()
        if self._store is not None and not self._is_published and self._store.check([_KEY]):
            self._is_published = True
            request.note_from_afar(self._store.get(_KEY).decode())

    def _publish(self) -> None:
        if self._store is not None and not self._is_published and (reason := stop_reason()) is not None:
            self._is_published = True
            self._store.set(_KEY, f"{reason} (rank {self._rank})")
