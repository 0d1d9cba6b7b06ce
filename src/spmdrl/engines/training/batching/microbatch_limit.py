"""How many tokens go through models at once: fewer where memory runs out, and so for the rest of a run."""

from __future__ import annotations

from collections.abc import Callable

MOST_HALVINGS = 3


class MemoryRanOut(RuntimeError):
    """A pass ran out of memory on some rank; it was ended in step with the others, so that it can be done again."""


class MicrobatchLimit:
    """The tokens of a micro-batch at most, the same on every rank; it may be halved three times."""

    def __init__(self, tokens: int):
        self._first = tokens
        self.num_halvings = 0
        self.when_halved: Callable[[str], None] | None = None
        """called with an allocator's words once the limit was halved, on every rank"""

    @property
    def tokens(self) -> int:
        return self.after(self.num_halvings)

    def after(self, num_halvings: int) -> int:
        """The limit once it was halved so often."""
        return max(1, self._first >> num_halvings)

    def halve(self, failure: MemoryRanOut) -> None:
        """Go on with half as many. Raises the failure where that has been done often enough."""
        if self.num_halvings == MOST_HALVINGS or self.tokens == 1:
            raise failure
        self.num_halvings += 1
        if self.when_halved is not None:
            self.when_halved(str(failure))
