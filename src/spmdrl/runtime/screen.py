"""The edge to a person's terminal: text from outside can't control it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

# Controls (C0 but newline and tab, DEL, C1), what turns the direction of text or hides in it, line and paragraph
# separators, tags, and halves of surrogate pairs, which no encoding can write.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def safe_text(text: str) -> str:
    """Return text in which each character that could steer a terminal is an escape, such as \\x1b or \\u202e."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def output_file(text: str) -> Path:
    """Return the path of a file to write. Raises ArgumentTypeError, as argparse has it, if it couldn't be."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ArgumentTypeError(f"{path} can't be written: name a file in a folder that exists and can be written to")
    return path


def show(text: object = "", *, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print a text of any origin, flushed; on standard output unless a stream is given."""
    stream = sys.stdout if stream is None else stream
    try:
        try:
            stream.write(safe_text(str(text)) + end)
        except UnicodeEncodeError:
            stream.write(safe_text(str(text)).encode("ascii", "backslashreplace").decode() + end)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError:
        # The stream is a file on a full disk, which is no reason to end the run; its buffer is tried again.
        return


@contextlib.contextmanager
def waiting(text: str, *, enabled: bool = True) -> Iterator[None]:
    """Show on a terminal's last line what is going on and since when, while the block runs; then clear the line.

    On standard error: standard output may be a verb's result. Nothing is written where that is no terminal.
    """
    stream = sys.stderr
    if not enabled or not stream.isatty():
        yield
        return
    started, ended = time.monotonic(), threading.Event()

    def count_seconds() -> None:
        while not ended.is_set():
            stream.write(f"\r{safe_text(text)} ... {time.monotonic() - started:.0f}s")
            stream.flush()
            ended.wait(1.0)

    counting = threading.Thread(target=count_seconds, name="waiting", daemon=True)
    counting.start()
    try:
        yield
    finally:
        ended.set()
        counting.join()
        stream.write("\r\x1b[2K")
        stream.flush()


def show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception as Python's own hook does, with a text that can't steer the terminal."""
    show("".join(traceback.format_exception(kind, error, trace)), stream=sys.stderr, end="")
