"""How the settings of a run changed between its parts, from the resolved configurations that it left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from spmdrl.job.run.resuming import ResumePoint
from spmdrl.observability.logs.jsonl import write_atomic
from spmdrl.observability.terminal.console import Console

RESOLVED_CONFIG = "config.resolved.yaml"

_LINE = re.compile(r"( *)([^\s:]+):(?: (.*)  # (.*))?")
# What a resumed run may give differently without being another one.
_OF_THE_START = ("resume", "run.")


def keep_config(resolved: str, folder: Path, point: ResumePoint | None, console: Console) -> None:
    """Write the resolved configuration; where it changed at the point, print how, and keep the earlier one too."""
    path = folder / RESOLVED_CONFIG
    if point is not None:
        step, in_checkpoint = point.record.step, point.folder / RESOLVED_CONFIG
        # Checkpoints of earlier versions don't hold it.
        source = in_checkpoint if in_checkpoint.is_file() else path
        before = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
        changes = list(changed_settings(before, resolved))
        for key, old, new in changes:
            console.note(f"{key} was {old} until step {step} and is {new} from here")
        if changes:
            write_atomic(folder / resolved_config_until(step), before)
    write_atomic(path, resolved)


def resolved_config_until(step: int) -> str:
    """The name of the file with the configuration that a run had until a step."""
    return f"config.resolved.step_{step:06d}.yaml"


def changed_settings(before: str, now: str) -> Iterator[tuple[str, str, str]]:
    """(key, value before, value now) of each setting that differs; "not set" for one that isn't there.

    A setting that only the newer file has, at its default, came with a newer version and isn't counted.
    """
    old, new = dict(_settings(before)), dict(_settings(now))
    for key in [*new, *(key for key in old if key not in new)]:
        is_new_default = key not in old and new[key][1] == "default"
        values = [side.get(key, ("not set", ""))[0] for side in (old, new)]
        if values[0] != values[1] and not is_new_default and not key.startswith(_OF_THE_START):
            yield key, values[0], values[1]


def _settings(resolved: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each dotted key with its value, as YAML, and its origin; lines of another form are left out."""
    sections: list[str] = []
    for line in resolved.splitlines():
        if match := _LINE.fullmatch(line):
            indent, name, value, origin = match.groups()
            sections = sections[: len(indent) // 2]
            if value is None:
                sections.append(name)
            else:
                yield ".".join([*sections, name]), (value, origin)
