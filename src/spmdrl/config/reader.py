"""A strict reader of a run's configuration: YAML files and overrides into a tree of frozen dataclasses.

Later files win over earlier ones key by key, and overrides win over files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from spmdrl.config.conversion import complete, convert
from spmdrl.config.given import DEFAULT, Given, entries_of, inline, joined, leaves, plant, shortened, show, value_leaves
from spmdrl.config.key_names import Alias, KnownNames, WrittenKey, convert_aliases, spellings_of
from spmdrl.config.key_schema import describe, schema_keys
from spmdrl.config.sources import override_leaves, read_file

T = TypeVar("T")
_MOST_NAMES = 50
_NUM_SHOWN = 20


class ConfigError(ValueError):
    """Input that a run can't start with; the message names every fault, and a way out of each."""


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
    names = KnownNames(schema_keys(root_type), spellings_of(aliases), wished or {})
    trees = [read_file(path, problems) for path in files]
    sources = [list(leaves(given)) for given in trees if given is not None]
    sources.append(list(override_leaves(overrides, names, problems)))
    tree: dict[str, Given] = {}
    aliases_used: dict[str, str] = {}
    latest: dict[tuple[str, ...], WrittenKey] = {}
    for written in (key for source in sources for key in _canonical(source, names, problems)):
        plant(tree, written.parts, written.given)
        latest[written.parts] = written
        if written.alias is not None and written.convert is None:
            aliases_used[written.spelling] = written.alias.read_as
    complete(tree, root_type)
    unconverted = [key for alias in aliases.values() for key in latest.values() if key.convert and key.alias is alias]
    aliases_used |= convert_aliases(tree, unconverted, problems)
    complete(tree, root_type)
    conversion = convert(root_type, tree, names.wished)
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
    found, value = conversion.origin, conversion.value
    origin = {key: found.get(key, DEFAULT) for key, _ in value_leaves(value)}
    return LoadedConfig(value, origin, aliases_used)


def resolved_yaml(loaded: LoadedConfig[Any]) -> str:
    """The whole tree as YAML under its canonical names, each value followed by its origin as a comment."""
    return "\n".join(_resolved_lines(loaded.value, "", loaded.origin, indent="")) + "\n"


@contextmanager
def start_up() -> Iterator[None]:
    """While a run is set up, turn the errors of bad input (ValueError, OSError) into ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _canonical(
    source: Sequence[tuple[tuple[str, ...], Given]], names: KnownNames, problems: list[str]
) -> Iterator[WrittenKey]:
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
        yield WrittenKey(full, given, spelling, alias)


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
            yield f"{indent}{inline(name)}: {inline(entry)}  # {origin[path]}"
