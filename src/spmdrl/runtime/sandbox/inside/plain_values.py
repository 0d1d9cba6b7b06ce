"""JSON values between a program and its tests: data is copied, anything else is passed as a numbered handle.

So a program can't return its own code, such as an `__eq__` that is always true, to the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 100
_EXACT = (bool, int, str, type(None))


class Unsupported(Exception):
    """A value that can't be sent."""


class Handles:
    """Values of a program that its tests know only by number."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    def add(self, value: Any) -> int:
        """Number a value."""
        self._values.append(value)
        return len(self._values) - 1

    def get(self, number: int) -> Any:
        """Return the value with this number."""
        return self._values[number]


def encode(value: Any, handles: Handles | None, depth: int = 0) -> Any:
    """Encode a value for JSON; without handles, anything but data raises Unsupported."""
    if depth > _MAX_DEPTH:
        raise RecursionError(f"a value of more than {_MAX_DEPTH} levels")
    if type(value) in _EXACT:
        return value
    if isinstance(value, float):
        return ["float", float(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        pairs = [[encode(one, handles, depth + 1) for one in pair] for pair in value.items()]
        return ["dict", pairs]
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return [name, [encode(one, handles, depth + 1) for one in value]]
    if isinstance(value, (int, str)) and not hasattr(value, "name"):
        return int(value) if isinstance(value, int) else str(value)
    if (number := getattr(type(value), "_tests_number", None)) is not None:
        return ["handle", number(value)]
    if handles is None:
        raise Unsupported(f"a {type(value).__name__} can't be passed to the program")
    # numpy's arrays and numbers.
    if hasattr(value, "tolist") and not isinstance(value, type):
        return encode(value.tolist(), handles, depth + 1)
    return ["handle", handles.add(value)]


def decode(value: Any, handle: Callable[[int], Any]) -> Any:
    """Decode a value from JSON; `handle` makes values that are known by number."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "handle":
        return handle(rest[0])
    if kind == "float":
        return float.fromhex(rest[0])
    if kind == "complex":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if kind == "bytes":
        return bytes.fromhex(rest[0])
    if kind == "dict":
        return {decode(key, handle): decode(one, handle) for key, one in rest[0]}
    return _COLLECTIONS[kind](decode(one, handle) for one in rest[0])


_COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
