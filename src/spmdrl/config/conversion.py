"""Conversion of a tree of written values to dataclasses, which collects every fault instead of raising the first."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from spmdrl.config.given import DEFAULT, Given, Path, find, given_of, inline, joined, leaves, replant, show, within
from spmdrl.config.key_schema import (
    adapter,
    describe,
    describe_bounds,
    members_of,
    own_keys,
    schema,
    tag_of,
    tags_of,
    type_hints,
)
from spmdrl.observability.terminal.spelling import nearest

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


@dataclass(frozen=True)
class Fault:
    """One fault of a tree."""

    type: str
    """pydantic's name for it"""
    path: Path
    kind: Any
    """type that the schema expects"""
    refusal: str = ""
    """the message of a dataclass that refuses its own values"""
    advice: str = ""
    """advice for a key that another member of a union has"""
    owner: Any = None
    """dataclass with the key; for an item, its container"""

    @property
    def key(self) -> str:
        key = ""
        for step in self.path:
            key = f"{key}[{step}]" if isinstance(step, int) else joined(key, step)
        return key

    @property
    def is_unknown_key(self) -> bool:
        return self.type == "unexpected_keyword_argument"

    @property
    def wants_text(self) -> bool:
        """True if a number's text may be valid where the number isn't."""
        return self.type in ("string_type", "literal_error")


def faults_of(root: Any, error: ValidationError) -> list[Fault]:
    """Return pydantic's faults of a list with one tree; of a union, those of the member most like the value."""
    found = [_fault(root, entry) for entry in error.errors(include_url=False, include_input=False)]
    explained = {fault.path[:length] for fault in found for length in range(len(fault.path))}
    by_path: dict[Path, Fault] = {}
    for fault in found:
        if fault.path not in explained and (fault.path not in by_path or fault.wants_text):
            by_path[fault.path] = fault
    return list(by_path.values())


def _fault(root: Any, entry: ErrorDetails) -> Fault:
    """Return the fault at the end of pydantic's path: names, indices, and labels of union members."""
    path: Path = ()
    kind = holder = root
    union, choice, type_ = None, "", entry["type"]
    steps = deque(entry["loc"][1:])
    while steps:
        step, tags = steps.popleft(), tags_of(kind)
        holder, union, choice = (tags[str(step)], kind, str(step)) if tags else (kind, None, "")
        if tags or len(members_of(kind)) > 1:
            if not steps:
                break
            step = steps.popleft()
        path, kind = (*path, step), _below(holder, step)
    tag = tag_of(kind)
    if tag is not None and type_.startswith("union_tag"):
        choices: Any = Literal
        return Fault(type_, (*path, tag), choices[tuple(tags_of(kind))])
    if type_ == "missing" and isinstance(path[-1], int):
        return Fault("too_short", path[:-1], holder)
    fault = Fault(type_, path, kind, str(entry.get("ctx", {}).get("error", "")), owner=holder)
    return replace(fault, advice=_advice(fault, union, choice)) if fault.is_unknown_key and union else fault


def _below(kind: Any, step: str | int) -> Any:
    """Return the type of a field, item or entry of a dataclass, list or mapping, also inside a union."""
    for member in members_of(kind):
        arguments = get_args(member)
        if isinstance(step, int) and get_origin(member) in (tuple, list):
            return arguments[step if arguments[-1] is not ... and get_origin(member) is tuple else 0]
        if isinstance(step, str) and is_dataclass(member):
            hints: Any = type_hints
            return hints(member).get(step)
    return Any


def _advice(fault: Fault, union: Any, choice: str) -> str:
    """Return advice for a key that a section has only with other values of its tag; empty if none has it."""
    section, _, name = fault.key.rpartition(".")
    others = [other for other, member in tags_of(union).items() if name in type_hints(member)]
    if not others:
        return ""
    tag = f"{section}.{tag_of(union)}"
    known = f"{fault.key} is a key of {_listed(others, 'and')}, but {tag} is {choice}"
    return f"{known}; remove it, or set {tag} to {_listed(others, 'or')}"


def _listed(names: Sequence[str], last: str) -> str:
    *first, end = names
    return f"{', '.join(first)} {last} {end}" if first else end


def message_of(root: Any, fault: Fault, given: Given, advice: str | None) -> str:
    """Compose key, value, rule and a way out: the advice, the default, or a guess from the value."""
    is_out_of_bounds = fault.type in ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
    rule = describe_bounds(fault.kind) if is_out_of_bounds else describe(fault.kind)
    way_out = advice
    if is_out_of_bounds or (fault.type == "float_type" and isinstance(given.value, str) and not given.quoted):
        # Members of a union may have different defaults of the key.
        keys = [key for key in schema(root) if key.name == fault.key.partition("[")[0] and key.default is not MISSING]
        defaults = [key.default for key in keys if key.owner is fault.owner] or [key.default for key in keys]
        if defaults and all(default == defaults[0] for default in defaults):
            start = "the default is" if is_out_of_bounds else "write one such as"
            way_out = way_out or f"{start} {inline(defaults[0])}"
    return f"{fault.key} is {show(given)}, but must be {rule}; {way_out or _way_out(fault.kind, given, fault.key)}"


def _way_out(kind: Any, given: Given, key: str) -> str:
    members = members_of(kind)
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
        return f"write its keys below {key}:, one per line, or {{name: value}}"
    if given.value is None:
        return "write a value, or leave the key out" + (', or "" for empty text' if str in families else "")
    examples = {int: "8", float: "0.5", bool: "true", str: "name"}
    example = next((examples[family] for family in families if family in examples), "null")
    return f"write {choices[0]}" if choices else f"write one such as {example}"


def complete(entries: dict[str, Given], owner: Any, base: object = None) -> None:
    """Add what no source sets: defaults, and required sections."""
    for key in own_keys(owner, base=base):
        given = entries.get(key.name)
        if given is None and key.default is not MISSING:
            entries[key.name] = given_of(key.default, DEFAULT)
            continue
        if given is None and key.kind in key.sections:
            given = entries[key.name] = Given({}, "", DEFAULT)
        if given is not None and isinstance(given.value, dict) and key.sections:
            tag, chosen = tag_of(key.kind), type(key.default) if is_dataclass(key.default) else None
            section: Any = chosen if tag else key.sections[0]
            if tag in given.value:
                section = tags_of(key.kind).get(given.value[tag].text)
            if section is not None:
                complete(given.value, section, key.default if chosen is section else None)


@dataclass
class Conversion:
    """Result of a tree's conversion, or its faults."""

    value: Any = None
    problems: list[str] = field(default_factory=list)
    doubts: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """refusals by a dataclass because of keys that no source sets: another fault may be the reason"""
    unknown: list[tuple[str, Given]] = field(default_factory=list)
    missing: list[tuple[str, Any]] = field(default_factory=list)


def origins(tree: dict[str, Given]) -> dict[str, str]:
    """Return the origin of each key with a written value or a default."""
    return {".".join(parts): given.origin for parts, given in leaves(Given(tree, "", ""))}


def convert(root: Any, tree: dict[str, Given], advice_by_name: Mapping[str, str]) -> Conversion:
    """Convert a complete tree to a `root`; changes the tree. `advice_by_name` has advice for `key=value` that a key
    refuses.

    Unknown keys, which hide other faults, are removed. Numbers and booleans become text where text is expected, so that
    a run may be named 12 or no; only an empty value is null.
    """
    from pydantic import ValidationError

    found, as_written = Conversion(), dict[Path, Given]()
    is_changed = True
    while is_changed:
        # From JSON, a strict validator accepts lists as tuples and mappings as dataclasses, but no text as numbers.
        document = json.dumps([Given(tree, "", "").plain])
        try:
            (found.value,) = adapter(root).validate_json(document, strict=True)
            return found
        except ValidationError as error:
            faults = faults_of(root, error)
        is_changed = False
        for fault, given in [(fault, find(tree, fault.path)) for fault in faults]:
            if given is not None and fault.is_unknown_key:
                replant(tree, fault.path, None)
                if fault.advice:
                    found.problems.append(f"{given.origin}: {fault.advice}")
                else:
                    found.unknown.append((fault.key, given))
            elif given is not None and fault.wants_text and isinstance(given.value, int | float):
                as_written[fault.path] = given
                replant(tree, fault.path, replace(given, value=given.text))
            else:
                continue
            is_changed = True
    origin = origins(tree)
    for fault in faults:
        written = as_written.get(fault.path) or find(tree, fault.path)
        if fault.refusal:
            _add_refusal(found, fault, origin)
        elif written is None:
            found.missing.append((fault.key, fault.kind))
        else:
            advice = advice_by_name.get(f"{fault.key}={written.text.lower()}")
            found.problems.append(f"{written.origin}: {message_of(root, fault, written, advice)}")
    return found


def _add_refusal(found: Conversion, fault: Fault, origin: Mapping[str, str]) -> None:
    """Add a dataclass's refusal, after the origins of the keys that it names, else its section's."""
    message, (_, dot, section) = fault.refusal, fault.key.rpartition(".")
    if dot:
        # A class used in several sections names its keys by its usual section.
        message = re.sub(rf"(?<![\w.]){re.escape(section)}\.", f"{fault.key}.", message)
    named = [name for name in origin if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w|\[)", message)]
    suspects = named or [name for name in origin if within(name, fault.key)]
    written = [name for name in suspects if origin[name] != DEFAULT]
    unwritten = tuple(name for name in suspects if name not in written)
    if len(written) == 1:
        message = f"{origin[written[0]]}: {message}"
    elif written:
        message += " [" + "; ".join(f"{name} from {origin[name]}" for name in written) + "]"
    else:
        message = f"defaults: {message}"
    if unwritten:
        found.doubts.append((message, unwritten))
    else:
        found.problems.append(message)
