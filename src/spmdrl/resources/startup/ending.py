"""How a rank's work ends before it is done."""

from __future__ import annotations

from dataclasses import dataclass

_INTERRUPTION = "interrupted"


@dataclass(frozen=True)
class FirstFailure:
    """The failure that ended the job."""

    rank: int
    cause: str
    """in one line"""

    @property
    def is_interruption(self) -> bool:
        """Whether it was Ctrl-C, which all ranks get and one of them says."""
        return self.cause == _INTERRUPTION


class PeerFailed(Exception):
    """This rank ended because another one had failed before."""

    def __init__(self, first: FirstFailure):
        super().__init__(f"rank {first.rank} failed: {first.cause}")
        self.first = first


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with where the run was and how it goes on."""


def cause_of(failure: BaseException) -> str:
    """A failure in one line: its type, and the first line of its text."""
    if isinstance(failure, KeyboardInterrupt):
        return _INTERRUPTION
    words = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    kind = type(failure).__name__
    return f"{kind}: {words}" if words else kind
