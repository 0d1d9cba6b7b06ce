"""Messages on a pipe: an 8-byte big-endian length, then that many bytes of JSON."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

_HEADER = struct.Struct(">Q")
MAX_FRAME_BYTES = 1 << 30


def pack(message: Any) -> bytes:
    """One frame; values that JSON doesn't know (dates, decimals) travel as their text."""
    body = json.dumps(message, default=str).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a call takes {len(body)} bytes, but at most {MAX_FRAME_BYTES}; send fewer rows a call")
    return _HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any | None:
    """The next message; None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


class FrameReader:
    """Puts messages together from bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes; raises ValueError where the bytes are no frame."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame claims {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[_HEADER.size : end]))
            del self._buffer[:end]
        return messages
