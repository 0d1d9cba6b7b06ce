"""How a rank's work ends before it is done."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from spmdrl.resources.watch.stop_request import Stopped

_INTERRUPTION = "interrupted"
_STOP = "stopped by "
_CONSEQUENCES = re.compile(
    "Connection (closed|reset|refused)|Broken pipe|recvValue failed|sendBytes failed|remote process|NCCL|HCCL|RPCErr"
    r"|\beof\b|Socket Timeout|[Tt]imed out|has been shutdown|communicator was aborted|Interrupted by another",
)
_is_interrupted = False


@dataclass(frozen=True)
class FirstFailure:
    """The failure that ended the job."""

    rank: int
    cause: str
    """in one line"""

    @property
    def is_interruption(self) -> bool:
        """Whether it was Ctrl-C, which all ranks get and one of them reports."""
        return self.cause == _INTERRUPTION

    @property
    def is_stop(self) -> bool:
        """Whether a rank was asked to stop before ranks could agree about it."""
        return reason_of_stop(self.cause) is not None


class PeerFailed(Exception):
    """This rank ended because another one had failed before."""

    def __init__(self, first: FirstFailure):
        super().__init__(f"rank {first.rank} failed: {first.cause}")
        self.first = first


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with where the run was and how it goes on."""


@contextmanager
def noting_interrupts() -> Iterator[None]:
    """Within the block Ctrl-C is noted too: KeyboardInterrupt is lost where it is raised in a finalizer or callback."""
    # Ignored where a shell started the job in the background, and other than Python's own under a debugger.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _note(number: int, frame: FrameType | None) -> None:
    global _is_interrupted
    _is_interrupted = True
    raise KeyboardInterrupt


def raise_noted_interrupt() -> None:
    """Raise KeyboardInterrupt where Ctrl-C came before and was lost; for points at which a loop may end."""
    if _is_interrupted:
        raise KeyboardInterrupt


def is_consequence(failure: BaseException) -> bool:
    """Whether this is how the end of another rank looks from here."""
    return isinstance(failure, (RuntimeError, OSError)) and _CONSEQUENCES.search(str(failure)) is not None


def cause_of(failure: BaseException) -> str:
    """A failure in one line: its type, and the first line of its text."""
    if isinstance(failure, KeyboardInterrupt):
        return _INTERRUPTION
    if isinstance(failure, Stopped):
        return stop_cause(failure.reason)
    words = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    kind = type(failure).__name__
    return f"{kind}: {words}" if words else kind


def stop_cause(reason: str) -> str:
    """The cause of an end that was asked for."""
    return f"{_STOP}{reason}"


def reason_of_stop(cause: str) -> str | None:
    """What asked for the end that has this cause; None for a failure."""
    return cause.removeprefix(_STOP) if cause.startswith(_STOP) else None
