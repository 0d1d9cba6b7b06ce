"""A strict reader of a run's configuration: YAML files and overrides into a tree of frozen dataclasses.

Later files win over earlier ones, key by key; overrides win over files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from spmdrl.config.conversion import complete, convert, origins
from spmdrl.config.given import DEFAULT, Given, entries_of, inline, joined, leaves, plant, shortened, show, value_leaves
from spmdrl.config.key_names import Alias, KnownNames, WrittenKey, aliases_of_verb, convert_aliases, spellings_of
from spmdrl.config.key_schema import describe, schema, schema_keys
from spmdrl.config.sources import COMMAND_LINE, override_leaves, read_file
from spmdrl.config.verb_keys import STEPS, counterpart, is_read, summarised
from spmdrl.runtime.launch import StartRefused

T = TypeVar("T")
_MOST_NAMES = 50
_NUM_SHOWN = 20


class ConfigError(ValueError):
    """Unusable input; the message names every fault, with a way out of each."""


@dataclass(frozen=True)
class LoadedConfig(Generic[T]):
    """A tree of dataclasses with the origin of each value."""

    value: T
    origin: Mapping[str, str]
    """dotted key -> 'file:line', 'command line' or 'default'"""
    aliases_used: Mapping[str, str]
    """key as written -> its canonical key, or the result of its conversion"""
    unread: Sequence[str] = ()
    """sections and keys in files shared by several verbs that this verb doesn't read"""


def read_config(
    root_type: type[T],
    files: Sequence[Path],
    overrides: Sequence[str],
    aliases: Mapping[str, Alias],
    advice_by_name: Mapping[str, str] | None = None,
    verb: str | None = None,
    choose_root: Callable[[dict[str, Given]], type[T]] | None = None,
    needless: Mapping[str, str] | None = None,
) -> LoadedConfig[T]:
    """Read `files` and then `overrides` (`key=value`, `--key=value` or `--key value`) as a `root_type`.

    An alias counts as written, and one without a dot also inside the section of its canonical key. `advice_by_name` has
    advice for names that aren't keys, and for `key=value` that a key refuses. With a `verb`, aliases are its own, and
    keys that it doesn't read are refused. `choose_root` derives a type with more keys from the written tree. Raises
    ConfigError with all faults of all sources.
    """
    problems: list[str] = []
    keys = schema_keys(root_type)
    names = known_names(root_type, aliases, advice_by_name or {}, needless or {}, verb)
    trees = [read_file(path, problems) for path in files]
    sources = [list(leaves(given)) for given in trees if given is not None]
    sources.append(list(override_leaves(overrides, names, problems)))
    tree: dict[str, Given] = {}
    aliases_used: dict[str, str] = {}
    latest: dict[tuple[str, ...], WrittenKey] = {}
    for written in (key for source in sources for key in canonical(source, names, problems, aliases_used)):
        plant(tree, written.parts, written.given)
        latest[written.parts] = written
        if written.alias is not None and written.convert is None:
            aliases_used[written.spelling] = written.alias.read_as
    unread = [key for key in latest.values() if verb and names.is_known(key.key) and not is_read(verb, key.key)]
    if choose_root:
        root_type = choose_root(tree)
        names = replace(names, keys=schema_keys(root_type))
    complete(tree, root_type)
    order = {name: place for place, name in enumerate(aliases)}
    unconverted = [key for key in latest.values() if key.convert]
    unconverted.sort(key=lambda key: order.get(key.alias.name, 0) if key.alias else 0)
    aliases_used |= convert_aliases(tree, unconverted, problems, verb, keys)
    if verb:
        problems += _refused_keys(verb, unread, latest.values(), keys)
    complete(tree, root_type)
    conversion = convert(root_type, tree, names.advice_by_name)
    problems += conversion.problems
    problems += [
        f"{given.origin}: unknown key {shortened(key)} (= {show(given)}); {names.advice(key)}"
        for section, value in conversion.unknown
        for key, given in names.leaves_to_show(section, value)
    ]
    # Values that a broken file or a misspelt key would have set are neither missing nor wrong.
    if None not in trees:
        meant = {key for unknown, _ in conversion.unknown for key in names.meant(unknown)}
        problems += [doubt for doubt, keys in conversion.doubts if not meant & set(keys)]
        problems += [_missing_key(key, kind, files) for key, kind in conversion.missing if key not in meant]
    if problems:
        raise ConfigError(_together(problems))
    found, value = origins(tree), conversion.value
    origin = {key: found.get(key, DEFAULT) for key, _ in value_leaves(value)}
    read = [key.key for key in latest.values() if key not in unread]
    return LoadedConfig(value, origin, aliases_used, summarised([key.key for key in unread], read))


def known_names(
    root_type: type[Any],
    aliases: Mapping[str, Alias],
    advice_by_name: Mapping[str, str],
    needless: Mapping[str, str],
    verb: str | None = None,
) -> KnownNames:
    """Return the names of a configuration; with a verb, aliases are its own."""
    keys = schema_keys(root_type)
    spellings = spellings_of(aliases) | (aliases_of_verb(aliases, verb, keys) if verb else {})
    flags = [key.name for key in schema(root_type) if key.kind is bool]
    return KnownNames(keys, spellings, advice_by_name, needless, flags)


def resolved_yaml(loaded: LoadedConfig[Any]) -> str:
    """Return the whole tree as YAML under its canonical names, each value followed by its origin as a comment."""
    return "\n".join(yaml_lines(loaded.value, "", loaded.origin, indent="")) + "\n"


@contextmanager
def start_up() -> Iterator[None]:
    """Turn errors of bad input (ValueError, OSError) during a run's set-up into ConfigError."""
    try:
        yield
    except (ConfigError, StartRefused):
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def canonical(
    source: Sequence[tuple[tuple[str, ...], Given]], names: KnownNames, problems: list[str], used: dict[str, str]
) -> Iterator[WrittenKey]:
    """Yield the leaves of one source under canonical names; a key given under two names is a problem.

    `used` gets the names for which there is nothing to set.
    """
    written: dict[tuple[str, ...], str] = {}
    for parts, given in source:
        # Within sections, `optim.lr` is the same as lr below optim; names in a mapping of any names stay whole.
        full: tuple[str, ...] = ()
        for part in parts:
            full += tuple(part.split(".")) if names.is_section(full) else (part,)
        if len(full) > _MOST_NAMES:
            problems.append(f"{given.origin}: the key {shortened('.'.join(full))} has more than {_MOST_NAMES} names")
            continue
        alias, spelling, outer = None, "", ".".join(full)
        inner = names.without_sections(outer)
        if reason := names.reason_to_drop(inner, given):
            used[outer] = f"nothing to set: {reason}"
            continue
        if is_inner := inner != outer:
            full = tuple(inner.split("."))
        for length in range(len(full), 0, -1):
            spelling = ".".join(full[:length])
            # Text in place of a section, as in optim=adamw_torch.
            is_text = length == len(full) and isinstance(given.value, str) and names.is_section(full)
            if spelling in names.spellings and (is_text or spelling not in names.keys):
                alias = names.spellings[spelling]
                full = (alias.name,) if alias.is_relation else (*alias.key.split("."), *full[length:])
                break
        if is_inner:
            alias, spelling = alias or Alias(".".join(full)), outer
        name = ".".join(parts)
        if full in written:
            problems.append(f"{given.origin}: {name} and {written[full]} are the same key; keep one")
        written.setdefault(full, f"{name} ({given.origin})")
        yield WrittenKey(full, given, spelling, alias)


def _refused_keys(
    verb: str, unread: Sequence[WrittenKey], given: Collection[WrittenKey], keys: Sequence[str]
) -> Iterator[str]:
    """Yield the problems of keys that a verb doesn't read, unless they are for another verb, whose steps are given.

    A command line serves several verbs only if this one's steps are given too.
    """
    in_files = {key.key for key in given if key.given.origin != COMMAND_LINE}
    everywhere = {key.key for key in given}
    for written in unread:
        users = [other for other in STEPS if is_read(other, written.key)]
        is_override = written.given.origin == COMMAND_LINE
        is_shared = not everywhere.isdisjoint(STEPS.get(verb, ()))
        shared = everywhere if is_shared else set[str]() if is_override else in_files
        if not all(shared.isdisjoint(STEPS[user]) for user in users) or not (is_override or verb in STEPS):
            continue
        own = counterpart(verb, written.key, keys)
        ways = [f"set {own}" if own else "leave it out"]
        ways += [f"a file that {user} uses too has {STEPS[user][0]}" for user in users[:1] if not is_override]
        name = f"{written.spelling} ({written.key})" if written.alias else written.key
        yield f"{written.given.origin}: {name} isn't read by {verb}; {'; '.join(ways)}"


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


def yaml_lines(value: Any, key: str, origin: Mapping[str, str], *, indent: str) -> Iterator[str]:
    """Yield a tree's lines in YAML, each value followed by its origin as a comment."""
    for name, entry in entries_of(value).items():
        path = joined(key, name)
        if entries_of(entry):
            yield f"{indent}{inline(name)}:"
            yield from yaml_lines(entry, path, origin, indent=indent + "  ")
        else:
            yield f"{indent}{inline(name)}: {inline(entry)}  # {origin[path]}"
