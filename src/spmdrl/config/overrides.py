"""The command line of a run: which arguments are files and which are overrides, and what these set."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from spmdrl.config.given import Given, leaves, shortened
from spmdrl.config.key_names import KnownNames
from spmdrl.config.yaml_nodes import read_override

_KEY = re.compile(r"[A-Za-z_][\w.-]*")


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Part a command line into the files to read and the overrides: whatever has a `key=` or begins with `--`."""
    files, overrides = [], []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument.startswith("-") and len(argument) > 1:
            overrides.append(argument)
            if _awaits_value(argument) and rest and _is_value(rest[0]):
                overrides.append(rest.popleft())
        elif _is_pair(argument):
            overrides.append(argument)
        else:
            files.append(Path(argument))
    return files, overrides


def override_leaves(
    overrides: Sequence[str], names: KnownNames, problems: list[str]
) -> Iterator[tuple[tuple[str, ...], Given]]:
    rest = deque(overrides)
    latest: dict[tuple[str, ...], Given] = {}
    while rest:
        override = rest.popleft()
        key, equals, text = override.removeprefix("--").partition("=")
        if override.startswith("--"):
            key = key.replace("-", "_")
        if _awaits_value(override):
            if not (rest and _is_value(rest[0])):
                wish = names.wish(key)
                fault = (
                    f"there is no --{key}; {wish}"
                    if wish
                    else f"--{key} has no value; write --{key} VALUE or {key}=VALUE"
                )
                problems.append(f"command line: {shortened(fault)}")
                continue
            equals, text = "=", rest.popleft()
        if not equals or not _KEY.fullmatch(key):
            problems.append(
                f"command line: {shortened(repr(override))} is no override; write key.path=value or --key.path value"
            )
            continue
        given = read_override(key, text, problems)
        if given is not None:
            for parts, leaf in leaves(given, tuple(key.split("."))):
                latest.pop(parts, None)
                latest[parts] = leaf
    yield from latest.items()


def _awaits_value(argument: str) -> bool:
    return argument.startswith("--") and "=" not in argument


def _is_pair(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and _KEY.fullmatch(key) is not None


def _is_value(argument: str) -> bool:
    """Whether this can be the value of the flag before it, rather than the next flag, pair or file."""
    return not (argument.startswith("--") or _is_pair(argument) or argument.endswith((".yaml", ".yml")))
