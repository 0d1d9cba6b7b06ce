"""Written values with their origins, and their text in messages and files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import yaml

DEFAULT = "default"
"""Origin of a value that no source sets."""

FLOAT_TAG = "tag:yaml.org,2002:float"
FLOAT = re.compile(
    r"^(?:[-+]?(?:(?:0|[1-9][0-9]*(?:_[0-9]+)*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF))$"
)
NUMBER_STARTS = list("-+.0123456789")
_MOST_SHOWN = 200

Value: TypeAlias = "None | bool | int | float | str | list[Given] | dict[str, Given]"
Path: TypeAlias = "tuple[str | int, ...]"


class _YamlDumper(yaml.SafeDumper):
    """YAML dumper that quotes text which reads as a number, and keeps every string on one line."""


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_YamlDumper.add_implicit_resolver(FLOAT_TAG, FLOAT, NUMBER_STARTS)
_YamlDumper.add_representer(str, _represented)


@dataclass(frozen=True)
class Given:
    """A written value: parsed, as text, and its origin."""

    value: Value
    text: str
    origin: str
    quoted: bool = False

    @property
    def plain(self) -> Any:
        """Value without origins."""
        if isinstance(self.value, dict):
            return {name: given.plain for name, given in self.value.items()}
        if isinstance(self.value, list):
            return [given.plain for given in self.value]
        return self.value


def given_of(value: Any, origin: str) -> Given:
    """Return a value from code as if it were written at `origin`."""
    if isinstance(value, list | tuple):
        return Given([given_of(item, origin) for item in value], "", origin)
    if isinstance(value, dict) or is_dataclass(value):
        return Given({name: given_of(entry, origin) for name, entry in entries_of(value).items()}, "", origin)
    return Given(value, value if isinstance(value, str) else inline(value), origin)


def leaves(given: Given, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Given]]:
    """Yield every value below the mappings, with the path of names; an empty mapping counts as a value."""
    if not isinstance(given.value, dict) or (parts and not given.value):
        yield parts, given
        return
    for name, entry in given.value.items():
        yield from leaves(entry, (*parts, name))


def plant(tree: dict[str, Given], parts: Sequence[str], given: Given) -> None:
    """Set one value in a tree of mappings, creating mappings on the way in place of other values."""
    *sections, name = parts
    for section in sections:
        entry = tree.get(section)
        if entry is None or not isinstance(entry.value, dict):
            entry = tree[section] = Given({}, "", given.origin)
        assert isinstance(entry.value, dict)
        tree = entry.value
    there = tree.get(name)
    if not (there is not None and isinstance(there.value, dict) and given.value == {}):
        tree[name] = given


def find(tree: dict[str, Given], path: Path) -> Given | None:
    """Return the value at the end of these names and list indices, or None."""
    given: Given | None = Given(tree, "", "")
    for step in path:
        entries: Any = given.value if given is not None else None
        if isinstance(step, int):
            given = entries[step] if isinstance(entries, list) and step < len(entries) else None
        else:
            given = entries.get(step) if isinstance(entries, dict) else None
    return given


def replant(tree: dict[str, Given], path: Path, given: Given | None) -> None:
    """Replace the value at the end of these names and list indices; None removes it."""
    holder = find(tree, path[:-1])
    entries: Any = holder.value if holder is not None else {}
    if given is not None:
        entries[path[-1]] = given
    elif isinstance(entries, dict):
        entries.pop(path[-1], None)


def entries_of(value: Any) -> dict[str, Any]:
    """Return a value's children: the fields of a dataclass, the items of a mapping, else nothing."""
    if is_dataclass(value):
        return {entry.name: getattr(value, entry.name) for entry in fields(value) if entry.init}
    return dict(value) if isinstance(value, dict) else {}


def value_leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a tree of dataclasses and mappings; an empty mapping is a value."""
    entries = entries_of(value)
    if not entries:
        yield key, value
    for name, entry in entries.items():
        yield from value_leaves(entry, joined(key, name))


def joined(key: str, name: object) -> str:
    """Return a dotted key, or the name itself at the top."""
    return f"{key}.{name}" if key else str(name)


def within(name: str, key: str) -> bool:
    """Return True if `name` is `key` or below it."""
    return not key or name == key or name.startswith(key + ".")


def show(given: Given) -> str:
    """Return a value's text in a message."""
    if isinstance(given.value, dict):
        return shortened("a mapping (" + ", ".join(given.value) + ")") if given.value else "an empty mapping"
    if isinstance(given.value, list):
        return f"a list of {len(given.value)}" if given.value else "an empty list"
    if isinstance(given.value, str):
        return shortened(repr(given.text))
    return shortened(given.text) or "empty"


def shortened(text: str) -> str:
    """Return the text, cut if it is too long for a message."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def inline(value: object) -> str:
    """Format a value as YAML on one line: scalars as they are, lists, mappings and dataclasses in brackets."""
    # Most are defaults, the same in every config. 1, 1.0 and True are equal, as are 0.0 and -0.0, but not their texts.
    is_usual = isinstance(value, bool | int | float | str) or value is None
    return _scalar(repr(value), value) if is_usual else _dumped(value)


@lru_cache(maxsize=1024)
def _scalar(_written: str, value: object) -> str:
    return _dumped(value)


def _dumped(value: object) -> str:
    text: str = yaml.dump(
        [_plain(value)], Dumper=_YamlDumper, default_flow_style=True, width=float("inf"), sort_keys=False
    )
    return text.strip()[1:-1]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {name: _plain(entry) for name, entry in entries.items()} if (entries := entries_of(value)) else value
