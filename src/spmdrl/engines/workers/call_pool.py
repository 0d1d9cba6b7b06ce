"""Calls that are answered while other work goes on: submitted, answered in workers, and collected."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

from spmdrl.engines.workers.frames import pack
from spmdrl.engines.workers.process import PendingCall, WorkerSetup
from spmdrl.engines.workers.supervisor import Answers, Supervisor

A = TypeVar("A")


def is_debugged() -> bool:
    """Whether a debugger runs this process: a trace function is set, or it was started by pdb or debugpy."""
    started_by_debugger = any(flag == "-m" and module in ("pdb", "debugpy") for flag, module in pairwise(sys.orig_argv))
    return sys.gettrace() is not None or started_by_debugger


class CallPool(Generic[A]):
    """`submit` returns at once, `ready` names what is there, `collect` waits for it.

    The constructor loads the functions, in a child unless inline, and raises ValueError where one can't be loaded.
    Inline, `submit` computes the answer itself and nothing can be killed. `close` leaves no process behind.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        answers: Answers[A],
        *,
        num_workers: int,
        timeout_seconds: float,
        inline: Callable[[dict[str, Any]], A] | None = None,
    ):
        self._section = setup.section
        self._inline = inline
        self._changed = threading.Condition()
        self._waiting: set[Hashable] = set()
        self._answered: dict[Hashable, A] = {}
        self._is_closed = False
        self._supervisor: Supervisor[A] | None = None
        if inline is None:
            self._supervisor = Supervisor(
                setup, answers, self._deliver, num_workers=num_workers, timeout_seconds=timeout_seconds
            )

    def submit(self, key: Hashable, message: dict[str, Any], num_rows: int) -> None:
        """Ask for an answer under a key of the caller's. Raises ValueError for a key that waits to be collected."""
        nonce = secrets.token_hex(16)
        frame = b"" if self._supervisor is None else pack({"nonce": nonce, **message})
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"the {self._section} pool is closed")
            if key in self._waiting or key in self._answered:
                raise ValueError(f"a {self._section} call with key {key!r} was submitted and not yet collected")
            self._waiting.add(key)
        if self._supervisor is not None:
            self._supervisor.submit(PendingCall(key, nonce, frame, num_rows))
        else:
            assert self._inline is not None
            self._deliver(key, self._inline(message))

    def ready(self) -> list[Hashable]:
        """Keys of the calls whose answers can be collected without waiting, in the order in which they finished."""
        with self._changed:
            self._raise_failure()
            return list(self._answered)

    def collect(self, keys: Sequence[Hashable]) -> list[A]:
        """Wait for the answers of these calls and take them out, in the order of `keys`.

        Waits at most `timeout_seconds` for each call that is before them or with them in a worker's queue.
        """
        with self._changed:
            unknown = [key for key in keys if key not in self._waiting and key not in self._answered]
            if unknown:
                raise KeyError(f"no {self._section} call was submitted under {unknown!r}, or it was collected before")
            while any(key in self._waiting for key in keys):
                self._raise_failure()
                if self._is_closed:
                    raise RuntimeError(f"the {self._section} pool was closed with {len(self._waiting)} calls under way")
                self._changed.wait(1.0)
            return [self._answered.pop(key) for key in keys]

    @property
    def facts(self) -> Any:
        """What a worker found out about the functions as it loaded them; None inline."""
        return None if self._supervisor is None else self._supervisor.facts

    def close(self) -> None:
        """End the workers with all that they started; answers not yet collected stay, calls are given up."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._supervisor is not None:
            self._supervisor.close()

    def worker_pids(self) -> list[int]:
        """Process ids of the guards that run now; all workers descend from them."""
        return [] if self._supervisor is None else self._supervisor.worker_pids()

    def _deliver(self, key: Hashable, answer: A) -> None:
        with self._changed:
            self._waiting.discard(key)
            self._answered[key] = answer
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._supervisor is not None and self._supervisor.failure is not None:
            raise RuntimeError(
                f"the thread that watches the {self._section} processes failed"
            ) from self._supervisor.failure
