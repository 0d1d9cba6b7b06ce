"""Differences between resolved configurations, of a run's parts or of several runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

RESOLVED_CONFIG = "config.resolved.yaml"

_LINE = re.compile(r"( *)([^\s:]+):(?: (.*)  # (.*))?")
Settings = dict[str, tuple[str, str]]
"""Value of each dotted key, as YAML, and its origin."""
NOT_SET = "not set"
# Settings that a resumed run may change.
_OF_THE_START = ("resume", "run.")


def changed_settings(before: str, now: str) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value before, value now) of each setting that differs and that only a new start could keep."""
    for key, (old, new) in differing([settings_of(before), settings_of(now)]).items():
        if not key.startswith(_OF_THE_START):
            yield key, old, new


def differing(runs: Sequence[Settings]) -> dict[str, list[str]]:
    """Return the value in each run of settings that differ; "not set" for a missing one.

    A setting that some runs lack, and that all others have at its default, comes from another version or belongs to a
    section that those runs leave out, and doesn't count.
    """
    found = {}
    for key in dict.fromkeys(key for settings in runs for key in settings):
        values = [settings.get(key, (NOT_SET, "default")) for settings in runs]
        is_beside = (NOT_SET, "default") in values and all(origin == "default" for _, origin in values)
        if len({value for value, _ in values}) > 1 and not is_beside:
            found[key] = [value for value, _ in values]
    return found


def settings_of(resolved: str) -> Settings:
    """Return the settings of a resolved configuration; lines of another form are left out."""
    found: Settings = {}
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
