"""Values of one JSON array in a file of any size, read incrementally."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any


def array_values(path: str, chunks: Iterator[bytes], most_bytes: int) -> Iterator[tuple[str, Any, str | None]]:
    """Yield each value after its place (file:line:column), and before a key that one of its objects has twice, or None.

    Raises ValueError, with the line, for a fault in the text, after which nothing can be read, such as a value longer
    than `most_bytes`.
    """
    text = _ArrayText(path, chunks, most_bytes)
    text.skip("[")
    separator = "]" if text.next_letter() == "]" else ","
    while separator == ",":
        yield text.value()
        separator = text.next_letter()
        if separator not in (",", "]"):
            raise text.fault("',' or ']' expected after a row")
        if separator == ",":
            text.skip(",")
    text.skip("]")
    if text.next_letter():
        raise text.fault("text after the array's end")


def repeated_key(pairs: list[tuple[str, Any]]) -> str | None:
    """Return the first key that an object has more than once, or None."""
    keys = [key for key, _ in pairs]
    return None if len(set(keys)) == len(keys) else next(key for key in keys if keys.count(key) > 1)


class _ArrayText:
    """Rest of a JSON array's text, from its next value on."""

    def __init__(self, path: str, chunks: Iterator[bytes], most_bytes: int):
        self._path = path
        self._most_bytes = most_bytes
        self._texts = codecs.iterdecode(chunks, "utf-8")
        self._text = ""
        self._at = 0
        self._line = 1
        self._line_start = 0
        """start of the line within the kept text; negative if that part was dropped"""
        self._has_ended = False
        self._twice: str | None = None
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def next_letter(self) -> str:
        """Return the next letter that isn't space, or nothing at the end."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            self._count_lines(start, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def skip(self, letter: str) -> None:
        assert self.next_letter() == letter, (self._path, letter)
        self._at += 1

    def value(self) -> tuple[str, Any, str | None]:
        """Return the next value with its place, and a key that it has twice."""
        self.next_letter()
        place = f"{self._path}:{self._line}:{self._at - self._line_start + 1}"
        while True:
            self._twice = None
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                # A number at the end of the text may continue.
                if end < len(self._text) or not self._read_on():
                    self._count_lines(self._at, end)
                    self._at = end
                    return place, value, self._twice
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > self._most_bytes or not self._read_on():
                    raise self.fault(error.msg) from error
            except (RecursionError, ValueError) as error:
                raise self.fault("nested too deeply" if isinstance(error, RecursionError) else str(error)) from error

    def fault(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._path}:{self._line}: not a JSON array: {reason}; no row after this place can be read, mend the file"
        )

    def _count_lines(self, start: int, end: int) -> None:
        last = self._text.rfind("\n", start, end)
        if last >= 0:
            self._line += self._text.count("\n", start, end)
            self._line_start = last + 1

    def _read_on(self) -> bool:
        """Read about as much as is buffered, so that a long row isn't parsed many times; False at the end."""
        parts = [self._text[self._at :]]
        wanted = max(1, len(parts[0]))
        try:
            while wanted > 0 and not self._has_ended:
                part = next(self._texts, None)
                self._has_ended = part is None
                parts.append(part or "")
                wanted -= len(parts[-1])
        except UnicodeDecodeError as error:
            raise self.fault(f"byte 0x{error.object[error.start]:02x} isn't UTF-8") from error
        self._line_start -= self._at
        self._text, self._at = "".join(parts), 0
        return len(self._text) > len(parts[0])

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if (twice := repeated_key(pairs)) is not None:
            self._twice = twice
        return dict(pairs)
