"""Early ends of a rank's work, and their causes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spmdrl.runtime.supervision.stop_request import Stopped

_INTERRUPTION = "interrupted"
_STOP = "stopped by "
_DEATH = "process {pid} ended without a message, like a killed one"
_CONSEQUENCES = re.compile(
    "Connection (closed|reset|refused)|Broken pipe|recvValue failed|sendBytes failed|remote process|NCCL|HCCL|RPCErr"
    r"|\beof\b|Socket Timeout|[Tt]imed out|has been shutdown|communicator was aborted|Interrupted by another"
)


@dataclass(frozen=True)
class FirstFailure:
    """The failure that ended the job."""

    rank: int
    cause: str
    """one line of text"""

    @property
    def is_interruption(self) -> bool:
        """True for Ctrl-C, which all ranks get and one of them reports."""
        return self.cause == _INTERRUPTION

    @property
    def is_stop(self) -> bool:
        """True if a rank was asked to stop before ranks could agree about it."""
        return reason_of_stop(self.cause) is not None

    @property
    def is_death(self) -> bool:
        """True if other ranks found its process gone, so that it has no line of its own."""
        return self.cause.endswith(_DEATH.partition("}")[2])


class PeerFailed(Exception):
    """This rank ended because another one had failed before."""

    def __init__(self, first: FirstFailure):
        super().__init__(f"rank {first.rank} failed: {first.cause}")
        self.first = first


def death(rank: int, pid: int) -> FirstFailure:
    """Return the failure of a rank whose process is gone, and which has published none."""
    return FirstFailure(rank, _DEATH.format(pid=pid))


def is_consequence(failure: BaseException) -> bool:
    """Return True for an error that follows from the end of another rank."""
    return isinstance(failure, (RuntimeError, OSError)) and _CONSEQUENCES.search(str(failure)) is not None


def cause_of(failure: BaseException) -> str:
    """Describe a failure in one line: its type, and the first line of its text."""
    if isinstance(failure, KeyboardInterrupt):
        return _INTERRUPTION
    if isinstance(failure, Stopped):
        return stop_cause(failure.reason)
    words = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    kind = type(failure).__name__
    return f"{kind}: {words}" if words else kind


def stop_cause(reason: str) -> str:
    """Return the cause of a requested end."""
    return f"{_STOP}{reason}"


def reason_of_stop(cause: str) -> str | None:
    """Return the reason of a requested end by its cause; None for a failure."""
    return cause.removeprefix(_STOP) if cause.startswith(_STOP) else None
