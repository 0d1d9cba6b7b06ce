"""Written values to the types of a tree of dataclasses, with every fault collected rather than the first one raised."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spmdrl.config.yaml_nodes import Given, show
from spmdrl.observability.terminal.spelling import nearest

DEFAULT = "default"
FAILED = object()
"""Stands for a value that could not be made; the reason is among the problems."""

_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


@dataclass(frozen=True)
class Doubt:
    """A dataclass's refusal that rests on keys which no source sets: another fault may be the reason for it."""

    message: str
    keys: tuple[str, ...]


@dataclass
class Conversion:
    """Converts one tree; collects what went wrong, unknown and missing keys, and each key's origin."""

    wished: Mapping[str, str] = field(default_factory=dict)
    """advice for `key=value` that a key doesn't take"""
    problems: list[str] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    unknown: list[tuple[str, Given]] = field(default_factory=list)
    missing: list[tuple[str, Any]] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)

    def section(self, kind: Any, entries: dict[str, Given], key: str, base: object = None) -> Any:
        """A dataclass from its entries; what they leave out comes from `base`, else from the fields' defaults."""
        hints = get_type_hints(kind)
        own_fields = [entry for entry in fields(kind) if entry.init]
        values = {}
        for entry in own_fields:
            path = joined(key, entry.name)
            default = _default(entry, base)
            values[entry.name] = self._field(hints[entry.name], entries.get(entry.name), path, default)
        names = {entry.name for entry in own_fields}
        self.unknown += [(joined(key, name), given) for name, given in entries.items() if name not in names]
        if any(value is FAILED for value in values.values()):
            return FAILED
        try:
            return kind(**values)
        except ValueError as error:
            self._add_refusal(str(error), key)
            return FAILED

    def _field(self, kind: Any, given: Given | None, path: str, default: object) -> Any:
        section = section_type(kind)
        if given is None and default is MISSING:
            if section is kind:
                return self.section(section, {}, path)
            self.missing.append((path, kind))
            return FAILED
        if given is None:
            self.origin.update((leaf, DEFAULT) for leaf, _ in value_leaves(default, path))
            return default
        if section is not None and isinstance(given.value, dict):
            return self.section(section, given.value, path, default if isinstance(default, section) else None)
        value = self.convert(kind, given, path)
        if not is_dataclass(value):
            self.origin.update(_given_origins(given, path))
        return value

    def convert(self, kind: Any, given: Given, key: str) -> Any:
        """The value as `kind`, or FAILED."""
        family = get_origin(kind) or kind
        if kind is Any:
            return given.plain
        if family in (Union, types.UnionType):
            return self._union(kind, given, key)
        if is_dataclass(kind) and isinstance(given.value, dict):
            return self.section(kind, given.value, key)
        if family in (tuple, list) and isinstance(given.value, list):
            return self._items(kind, given.value, given, key)
        if family is dict and isinstance(given.value, dict):
            _, item = get_args(kind) or (str, Any)
            return self._whole(
                {name: self.convert(item, entry, joined(key, name)) for name, entry in given.value.items()}
            )
        value = _scalar(kind, given)
        return self._refuse(kind, given, key) if value is FAILED else value

    def _union(self, kind: Any, given: Given, key: str) -> Any:
        # The member that YAML itself saw goes first, so that 100 stays a number in `str | int`.
        members = sorted(get_args(kind), key=lambda member: not _is_natural(member, given))
        trials = []
        for member in members:
            trial = Conversion(self.wished)
            value = trial.convert(member, given, key)
            if value is not FAILED and not trial.unknown:
                self.origin.update(trial.origin)
                return value
            trials.append(trial)
        closest = [trial for member, trial in zip(members, trials, strict=True) if _is_natural(member, given)]
        if len(closest) != 1:
            return self._refuse(kind, given, key)
        self.problems += closest[0].problems
        self.doubts += closest[0].doubts
        self.unknown += closest[0].unknown
        self.missing += closest[0].missing
        return FAILED

    def _items(self, kind: Any, given_items: list[Given], given: Given, key: str) -> Any:
        arguments = get_args(kind) or (Any, ...)
        family = get_origin(kind) or kind
        if family is list or arguments[-1] is ...:
            kinds: Sequence[Any] = [arguments[0]] * len(given_items)
        elif len(arguments) == len(given_items):
            kinds = arguments
        else:
            return self._refuse(kind, given, key)
        converted = [
            self.convert(*pair, f"{key}[{index}]") for index, pair in enumerate(zip(kinds, given_items, strict=True))
        ]
        return self._whole(family(converted))

    @staticmethod
    def _whole(values: Any) -> Any:
        parts = values.values() if isinstance(values, dict) else values
        return FAILED if any(part is FAILED for part in parts) else values

    def _refuse(self, kind: Any, given: Given, key: str) -> Any:
        way_out = self.wished.get(f"{key}={given.text.lower()}") or _way_out(kind, given, key)
        self.problems.append(f"{given.origin}: {key} is {show(given)}, but must be {describe(kind)}; {way_out}")
        return FAILED

    def _add_refusal(self, message: str, key: str) -> None:
        """A refusal by the dataclass itself, after the origins of the keys that it names, else of its section's."""
        named = [name for name in self.origin if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w|\[)", message)]
        suspects = named or [name for name in self.origin if within(name, key)]
        written = [name for name in suspects if self.origin[name] != DEFAULT]
        unwritten = tuple(name for name in suspects if name not in written)
        if len(written) == 1:
            message = f"{self.origin[written[0]]}: {message}"
        elif written:
            message += " [" + "; ".join(f"{name} from {self.origin[name]}" for name in written) + "]"
        else:
            message = f"defaults: {message}"
        if unwritten:
            self.doubts.append(Doubt(message, unwritten))
        else:
            self.problems.append(message)


def joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def within(name: str, key: str) -> bool:
    """Whether `name` is `key` or below it."""
    return not key or name == key or name.startswith(key + ".")


def section_type(kind: Any) -> Any | None:
    """The dataclass that a field of this type holds where it is one, or one or None; None elsewhere."""
    if is_dataclass(kind):
        return kind
    if get_origin(kind) in (Union, types.UnionType):
        members = [member for member in get_args(kind) if member is not type(None)]
        if len(members) == 1 and is_dataclass(members[0]):
            return members[0]
    return None


def schema_keys(kind: Any, key: str = "") -> Iterator[str]:
    """Every dotted key of a tree of dataclasses, sections included."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        path = joined(key, entry.name)
        yield path
        section = section_type(hints[entry.name])
        if section is not None:
            yield from schema_keys(section, path)


def describe(kind: Any) -> str:
    """A type in words."""
    family = get_origin(kind) or kind
    arguments = get_args(kind)
    if family in (Union, types.UnionType):
        return " or ".join(describe(member) for member in arguments)
    if family is Literal:
        return "one of " + ", ".join(map(str, arguments)) if len(arguments) > 1 else str(arguments[0])
    if family in (tuple, list):
        if not arguments:
            return "a list"
        if family is list or arguments[-1] is ...:
            return f"a list, each item {describe(arguments[0])}"
        return f"a list of {len(arguments)}: " + ", ".join(describe(item) for item in arguments)
    if is_dataclass(kind):
        return "a mapping with keys of " + ", ".join(entry.name for entry in fields(kind))
    if family is dict:
        return "a mapping"
    return _SCALARS.get(kind, getattr(kind, "__name__", str(kind)))


def default_of(kind: Any, key: str) -> Any:
    """The default of a dotted key of a tree of dataclasses, or None where it has none."""
    value: Any = None
    for name in key.split("."):
        entry = next(entry for entry in fields(kind) if entry.name == name)
        value = _default(entry, value)
        if value is MISSING:
            return None
        kind = type(value)
    return value


def _default(entry: Field[Any], base: object) -> object:
    if base is not None:
        return getattr(base, entry.name)
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def value_leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Each dotted key of a tree with its value; an empty mapping is a value itself."""
    entries = entries_of(value)
    if not entries:
        yield key, value
    for name, entry in entries.items():
        yield from value_leaves(entry, joined(key, name))


def entries_of(value: Any) -> dict[str, Any]:
    """What stands below a value in the tree: a dataclass' fields, a mapping's items, nothing otherwise."""
    if is_dataclass(value):
        return {entry.name: getattr(value, entry.name) for entry in fields(value) if entry.init}
    return dict(value) if isinstance(value, dict) else {}


def _given_origins(given: Given, key: str) -> Iterator[tuple[str, str]]:
    if not isinstance(given.value, dict) or not given.value:
        yield key, given.origin
        return
    for name, entry in given.value.items():
        yield from _given_origins(entry, joined(key, name))


def _scalar(kind: Any, given: Given) -> Any:
    value = given.value
    if get_origin(kind) is Literal:
        return _literal(get_args(kind), given)
    if kind is type(None) and value is None:
        return None
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _as_float(value)
    if kind in (int, bool) and type(value) is kind:
        return value
    # Text is taken as written, so that a run may be called 12 or no; only an empty value is none.
    if kind is str and isinstance(value, str | int | float | bool):
        return given.text
    return FAILED


def _as_float(value: int | float) -> Any:
    try:
        number = float(value)
    except OverflowError:
        return FAILED
    # NaN would pass most checks against a bound.
    return FAILED if math.isnan(number) else number


def _literal(choices: Sequence[Any], given: Given) -> Any:
    for choice in choices:
        if type(given.value) is type(choice) and given.value == choice:
            return choice
        # YAML takes a bare off or no for false, and 2 for a number.
        if isinstance(choice, str) and not isinstance(given.value, list | dict) and given.text == choice:
            return choice
    return FAILED


def _is_natural(member: Any, given: Given) -> bool:
    family = get_origin(member) or member
    if isinstance(given.value, dict):
        return family is dict or is_dataclass(member)
    if isinstance(given.value, list):
        return family in (list, tuple)
    if family is Literal:
        return _literal(get_args(member), given) is not FAILED
    return type(given.value) is member


def _way_out(kind: Any, given: Given, key: str) -> str:
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    families = [get_origin(member) or member for member in members]
    choices = [str(choice) for member in members if get_origin(member) is Literal for choice in get_args(member)]
    near = nearest(given.text, choices)
    if near is not None:
        return f"did you mean {near}?"
    if int in families and isinstance(given.value, float):
        return f"write {given.value:.0f}, without point or exponent" if given.value.is_integer() else "round it"
    if given.quoted and {int, float, bool} & set(families):
        return "remove the quotes if it is one"
    if {tuple, list} & set(families):
        return f"write [{given.text}]" if given.text else "write [first, second]"
    if any(is_dataclass(member) for member in members) or dict in families:
        return f"write its keys below {key}:, one a line, or {{name: value}}"
    if given.value is None:
        return "write a value, or leave the key out" + (', or "" for empty text' if str in families else "")
    return f"write {choices[0]}" if choices else f"write one such as {_example(families)}"


def _example(families: Sequence[Any]) -> str:
    examples = {int: "8", float: "0.5", bool: "true", str: "name"}
    return next((examples[family] for family in families if family in examples), "null")
