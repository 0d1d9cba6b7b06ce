"""How the resolved configurations differ that a run left: of its parts, and of several runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

RESOLVED_CONFIG = "config.resolved.yaml"

_LINE = re.compile(r"( *)([^\s:]+):(?: (.*)  # (.*))?")
# What a resumed run may give differently without being another one.
_OF_THE_START = ("resume", "run.")


def changed_settings(before: str, now: str) -> Iterator[tuple[str, str, str]]:
    """(key, value before, value now) of each setting that differs; "not set" for one that isn't there.

    A setting that only the newer file has, at its default, came with a newer version and isn't counted.
    """
    old, new = settings_of(before), settings_of(now)
    for key in [*new, *(key for key in old if key not in new)]:
        is_new_default = key not in old and new[key][1] == "default"
        values = [side.get(key, ("not set", ""))[0] for side in (old, new)]
        if values[0] != values[1] and not is_new_default and not key.startswith(_OF_THE_START):
            yield key, values[0], values[1]


def settings_of(resolved: str) -> dict[str, tuple[str, str]]:
    """Each dotted key with its value, as YAML, and its origin; lines of another form are left out."""
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
