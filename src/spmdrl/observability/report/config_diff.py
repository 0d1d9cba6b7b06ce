"""Differences between resolved configurations, of a run's parts or of several runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

RESOLVED_CONFIG = "config.resolved.yaml"

_LINE = re.compile(r"( *)([^\s:]+):(?: (.*)  # (.*))?")
# Settings that a resumed run may change.
_OF_THE_START = ("resume", "run.")


def changed_settings(before: str, now: str) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value before, value now) of each setting that differs; "not set" for a missing one.

    A setting that only the newer file has, at its default, comes from a newer version and doesn't count.
    """
    old, new = settings_of(before), settings_of(now)
    for key in [*new, *(key for key in old if key not in new)]:
        is_new_default = key not in old and new[key][1] == "default"
        values = [side.get(key, ("not set", ""))[0] for side in (old, new)]
        if values[0] != values[1] and not is_new_default and not key.startswith(_OF_THE_START):
            yield key, values[0], values[1]


def settings_of(resolved: str) -> dict[str, tuple[str, str]]:
    """Return each dotted key with its value, as YAML, and its origin; lines of another form are left out."""
    found: dict[str, tuple[str, str]] = {}
    sections: list[str] = []
    for line in resolved.splitlines():
        if match := _LINE.fullmatch(line):
            indent, name, value, origin = match.groups()
            sections = sections[: len(indent) // 2]
            if value is None:
                sections.append(name)
            else:
                found[".".join([*sections, name])] = value, origin
    return found
