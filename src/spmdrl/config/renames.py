"""Names that a configuration also understands, with a conversion where the other name counts something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from spmdrl.config.yaml_nodes import Given, find, given_of, inline, plant, unplant


@dataclass(frozen=True)
class Settings:
    """All sources together, by canonical keys."""

    tree: dict[str, Given]
    default: Callable[[str], Any]

    def is_given(self, key: str) -> bool:
        return find(self.tree, tuple(key.split("."))) is not None

    def value(self, key: str) -> Any:
        """What was written for the key, or its default."""
        given = find(self.tree, tuple(key.split(".")))
        return self.default(key) if given is None else given.plain


Convert: TypeAlias = Callable[[Given, Settings], dict[str, Any]]
"""Canonical keys and their values from what was written; raises ValueError with the rest of a sentence that begins
with the alias."""


@dataclass(frozen=True)
class Alias:
    """Another name for `key`.

    With `convert`, the value of `key` is computed once all sources are read, and other keys that the conversion names
    are set where no source sets them.
    """

    key: str
    origin: str = ""
    """the trainers that the name comes from"""
    there: str = ""
    """what it means there"""
    here: str = ""
    """what it sets here, where that is more than `key`"""
    convert: Convert | None = None

    @property
    def read_as(self) -> str:
        return f"{self.key} ({self.here})" if self.here else self.key


@dataclass(frozen=True)
class Unconverted:
    """An alias as a source wrote it, before its conversion."""

    spelling: str
    alias: Alias
    given: Given


def spellings_of(aliases: Mapping[str, Alias]) -> dict[str, Alias]:
    """Every way to write the aliases: one without a dot is also understood inside the section of its key."""
    spellings = {}
    for name, alias in aliases.items():
        section = alias.key.rpartition(".")[0]
        if "." not in name and section:
            spellings[f"{section}.{name}"] = alias
        spellings[name] = alias
    return spellings


def convert_aliases(settings: Settings, pending: list[Unconverted], problems: list[str]) -> dict[str, str]:
    """Put the converted values into the tree; returns what each spelling is read as. Refusals go to `problems`."""
    used = {}
    for entry in pending:
        assert entry.alias.convert is not None, entry.spelling
        unplant(settings.tree, tuple(entry.alias.key.split(".")))
        try:
            converted = entry.alias.convert(entry.given, settings)
        except ValueError as error:
            problems.append(f"{entry.given.origin}: {entry.spelling} {error}")
            continue
        values = {
            key: value for key, value in converted.items() if key == entry.alias.key or not settings.is_given(key)
        }
        for key, value in values.items():
            plant(settings.tree, tuple(key.split(".")), given_of(value, entry.given.origin))
        used[entry.spelling] = ", ".join(f"{key}={inline(value)}" for key, value in values.items()) or "nothing set"
    return used
