"""Progress of answering many prompts, on a stream beside the answers themselves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from spmdrl.observability.terminal.units import count, duration

TERMINAL_SECONDS = 1.0
FILE_SECONDS = 10.0
"""Interval of lines in a log, which keeps all of them."""


class GenerationProgress:
    """Progress of finished rows and their tokens: `generated 96/400 rows | 3.1k tok/s | eta 12s`, at most once a
    second.

    `rows` is the word for them, such as `rows of rank 0`.
    """

    def __init__(
        self, num_rows: int, rows: str = "rows", *, stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._num_rows = num_rows
        self._rows = rows
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._on_terminal = self._stream.isatty()
        self._num_done = self._num_tokens = 0
        self._started = self._printed = clock()

    def add(self, num_rows: int, num_tokens: int) -> None:
        """Count rows that have ended; the final line is always printed."""
        self._num_done += num_rows
        self._num_tokens += num_tokens
        now, is_last = self._clock(), self._num_done == self._num_rows
        if is_last or now - self._printed >= (TERMINAL_SECONDS if self._on_terminal else FILE_SECONDS):
            self._printed = now
            self._print(max(now - self._started, 1e-9), is_last)

    def _print(self, seconds: float, is_last: bool) -> None:
        parts = [
            f"generated {self._num_done}/{self._num_rows} {self._rows}",
            f"{count(self._num_tokens / seconds)} tok/s",
        ]
        if is_last:
            parts.append(duration(seconds))
        else:
            parts.append(f"eta {duration(seconds / self._num_done * (self._num_rows - self._num_done))}")
        line = " | ".join(parts)
        # Overwrite the terminal's line, even a longer one.
        self._stream.write(f"\r{line}\x1b[K" + "\n" * is_last if self._on_terminal else f"{line}\n")
        self._stream.flush()
