"""Values of a raw config.json, checked one by one; errors name key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T", int, str)

# Far beyond any model; larger values would exhaust memory or time before the weights are found not to fit.
_MOST = {"num_hidden_layers": 2**11, "vocab_size": 2**24, "max_position_embeddings": 2**40}
_MOST_OF_OTHERS = 2**20


def whole_number(raw: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """Return a plausible whole number >= `least`; a missing or null one is the default, or an error."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key} is {value!r}, but must be a whole number >= {least}")
    if value > (most := _MOST.get(key, _MOST_OF_OTHERS)):
        raise ValueError(f"{key} is {value}, but models with more than {most} aren't built; correct it")
    return value


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number above 0; a missing or null one is the default, or an error without one."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{key} is {value!r}, but must be a number above 0")
    return float(value)


def optional_number(raw: Mapping[str, Any], key: str) -> float | None:
    """Return a number above 0; None for a missing or null one."""
    return None if raw.get(key) is None else number(raw, key)


def flag(raw: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Return true or false; a missing one is the default. Some readers take null for false, others for missing."""
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, but must be true or false")
    return value


def only(raw: Mapping[str, Any], key: str, supported: object) -> None:
    """Raise ValueError for any given value but the supported one."""
    value = raw.get(key, supported)
    if value is not None and value != supported:
        raise ValueError(f"{key} {value!r} is not supported; supported is {supported!r}")


def entries(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object; a missing or null one is empty."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {value!r}, but must be a JSON object")
    return value


def values(raw: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    """Return a list of values of one kind; a missing or null one is empty."""
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise ValueError(f"{key} is {value!r}, but must be a list of {kind.__name__} values")
    return value
