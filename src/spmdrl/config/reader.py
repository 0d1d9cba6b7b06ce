"""A strict reader of a run's configuration: YAML files and overrides into a tree of frozen dataclasses.

The tree's types are the schema. A field may be int, float, bool, str, Literal, tuple[X, ...], list, dict[str, Any], a
dataclass, or a union of those. Later files win over earlier ones key by key, and overrides win over files.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from spmdrl.config.renames import Alias, Settings, Unconverted, convert_aliases, spellings_of
from spmdrl.config.unknown_names import KnownNames
from spmdrl.config.values import FAILED, Conversion, default_of, describe, entries_of, joined, schema_keys
from spmdrl.config.yaml_nodes import Given, inline, leaves, plant, read_file, read_override, shortened, show

T = TypeVar("T")
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_MOST_NAMES = 50
_NUM_SHOWN = 20


class ConfigError(ValueError):
    """Input that a run can't start with; the message names every fault found, and a way out of each."""


@dataclass(frozen=True)
class LoadedConfig(Generic[T]):
    """A tree of dataclasses and where each of its values comes from."""

    value: T
    origin: Mapping[str, str]
    """dotted key -> 'file:line', 'command line' or 'default'"""
    aliases_used: Mapping[str, str]
    """key as it was written -> its canonical key, or what it sets where a conversion lies between"""


def read_config(
    root_type: type[T],
    files: Sequence[Path],
    overrides: Sequence[str],
    aliases: Mapping[str, Alias],
    wished: Mapping[str, str] | None = None,
) -> LoadedConfig[T]:
    """Read `files` and then `overrides` (`key=value`, `--key=value` or `--key value`) as a `root_type`.

    An alias counts as written, and one without a dot also inside the section of its canonical key. `wished` has advice
    for names that aren't keys, and for `key=value` where a key doesn't take that value.
    Raises ConfigError with all faults of all sources.
    """
    problems: list[str] = []
    names = KnownNames(list(schema_keys(root_type)), spellings_of(aliases), wished or {})
    trees = [read_file(path, problems) for path in files]
    sources = [list(leaves(given)) for given in trees if given is not None]
    sources.append(list(_override_leaves(overrides, names, problems)))
    tree: dict[str, Given] = {}
    aliases_used: dict[str, str] = {}
    unconverted: dict[tuple[str, ...], Unconverted] = {}
    for source in sources:
        for leaf in _canonical(source, names, problems):
            plant(tree, leaf.parts, leaf.given)
            unconverted.pop(leaf.parts, None)
            if leaf.alias is not None and leaf.alias.convert is not None:
                unconverted[leaf.parts] = Unconverted(leaf.spelling, leaf.alias, leaf.given)
            elif leaf.alias is not None:
                aliases_used[leaf.spelling] = leaf.alias.read_as
    in_order = sorted(unconverted.values(), key=lambda entry: list(aliases.values()).index(entry.alias))
    settings = Settings(tree, lambda key: default_of(root_type, key))
    aliases_used |= convert_aliases(settings, in_order, problems)
    conversion = Conversion(names.wished)
    value = conversion.section(root_type, tree, "")
    problems += conversion.problems
    problems += [
        f"{given.origin}: unknown key {shortened(key)} (= {show(given)}); {names.advice(key)}"
        for section, value in conversion.unknown
        for key, given in names.leaves_to_show(section, value)
    ]
    # What a broken file or a misspelt key would have given is neither missing nor wrong.
    if None not in trees:
        meant = {key for unknown, _ in conversion.unknown for key in names.meant(unknown)}
        problems += [doubt.message for doubt in conversion.doubts if not meant & set(doubt.keys)]
        problems += [_missing_key(key, kind, files) for key, kind in conversion.missing if key not in meant]
    if problems:
        raise ConfigError(_together(problems))
    assert value is not FAILED
    return LoadedConfig(value, conversion.origin, aliases_used)


def resolved_yaml(loaded: LoadedConfig[Any]) -> str:
    """The whole tree as YAML under its canonical names, each value followed by its origin as a comment."""
    return "\n".join(_resolved_lines(loaded.value, "", loaded.origin, indent="")) + "\n"


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


@contextmanager
def start_up() -> Iterator[None]:
    """While a run is set up, turns what its input made fail (ValueError, OSError) into ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _awaits_value(argument: str) -> bool:
    return argument.startswith("--") and "=" not in argument


def _is_pair(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and _KEY.fullmatch(key) is not None


def _is_value(argument: str) -> bool:
    """Whether this can be the value of the flag before it, rather than the next flag, pair or file."""
    return not (argument.startswith("--") or _is_pair(argument) or argument.endswith((".yaml", ".yml")))


def _override_leaves(
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


@dataclass(frozen=True)
class _Leaf:
    """One written value under its canonical name, and the alias that it was written under."""

    parts: tuple[str, ...]
    given: Given
    spelling: str
    alias: Alias | None


def _canonical(
    source: Sequence[tuple[tuple[str, ...], Given]], names: KnownNames, problems: list[str]
) -> Iterator[_Leaf]:
    """The leaves of one source under canonical names; a key that it gives under two names is a problem."""
    written: dict[tuple[str, ...], str] = {}
    for parts, given in source:
        # At the top of a source, `optim.lr` is the same as lr below optim.
        full = (*parts[0].split("."), *parts[1:])
        if len(full) > _MOST_NAMES:
            problems.append(f"{given.origin}: the key {shortened('.'.join(full))} has more than {_MOST_NAMES} names")
            continue
        alias, spelling = None, ""
        for length in range(1, len(full) + 1):
            spelling = ".".join(full[:length])
            if spelling in names.spellings and spelling not in names.keys:
                alias = names.spellings[spelling]
                full = (*alias.key.split("."), *full[length:])
                break
        name = ".".join(parts)
        if full in written:
            problems.append(f"{given.origin}: {name} and {written[full]} are the same key; keep one")
        written.setdefault(full, f"{name} ({given.origin})")
        yield _Leaf(full, given, spelling, alias)


def _missing_key(key: str, kind: Any, files: Sequence[Path]) -> str:
    where = f"set it in {files[-1]}" if files else "set it in a YAML file"
    read = ", ".join(map(str, files)) or "no file"
    return f"{read}: {key} is required ({describe(kind)}), but is not given; {where}, or add {key}=VALUE to the command"


def _together(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    more = [f"... and {len(problems) - _NUM_SHOWN} more"] if len(problems) > _NUM_SHOWN else []
    shown = [*problems[:_NUM_SHOWN], *more]
    return f"{len(problems)} faults in the configuration:\n" + "\n".join(f"  {problem}" for problem in shown)


def _resolved_lines(value: Any, key: str, origin: Mapping[str, str], *, indent: str) -> Iterator[str]:
    for name, entry in entries_of(value).items():
        path = joined(key, name)
        if entries_of(entry):
            yield f"{indent}{inline(name)}:"
            yield from _resolved_lines(entry, path, origin, indent=indent + "  ")
        else:
            yield f"{indent}{inline(name)}: {inline(_plain(entry))}  # {origin[path]}"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    entries = entries_of(value)
    return {name: _plain(entry) for name, entry in entries.items()} if entries else value
