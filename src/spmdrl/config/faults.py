"""What pydantic finds wrong with a tree of written values: where in the tree, and in words with a way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from spmdrl.config.given import Given, Path, joined, show
from spmdrl.config.key_schema import describe, describe_bounds, members_of, tag_of, tags_of, type_hints
from spmdrl.observability.terminal.spelling import nearest


@dataclass(frozen=True)
class Fault:
    """One fault of a tree."""

    type: str
    """pydantic's name for it"""
    path: Path
    kind: Any
    """the type that the schema has there"""
    refusal: str = ""
    """the words of a dataclass that refuses its own values"""
    advice: str = ""
    """what to do about a key that another member of a union has"""

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
    def is_out_of_bounds(self) -> bool:
        return self.type in ("greater_than", "greater_than_equal", "less_than", "less_than_equal")

    @property
    def wants_text(self) -> bool:
        """Whether the text of a number may do where the number doesn't."""
        return self.type in ("string_type", "literal_error")

    def message(self, given: Given, way_out: str | None) -> str:
        """The key, its value, the rule and a way out."""
        rule = describe_bounds(self.kind) if self.is_out_of_bounds else describe(self.kind)
        return f"{self.key} is {show(given)}, but must be {rule}; {way_out or _way_out(self.kind, given, self.key)}"


def faults_of(root: Any, error: ValidationError) -> list[Fault]:
    """Pydantic's faults of a list with one tree; of a union's, those of the member that the value resembles most."""
    entries = error.errors(include_url=False, include_input=False)
    found = [_fault(entry["type"], _place(root, entry["loc"][1:]), entry.get("ctx", {})) for entry in entries]
    explained = {fault.path[:length] for fault in found for length in range(len(fault.path))}
    by_path: dict[Path, Fault] = {}
    for fault in found:
        if fault.path not in explained and (fault.path not in by_path or fault.wants_text):
            by_path[fault.path] = fault
    return list(by_path.values())


@dataclass(frozen=True)
class _Place:
    """Where a fault is: the type there, the place that holds it, and what the tag of a union has chosen there."""

    path: Path
    kind: Any
    holder: _Place | None = None
    union: Any = None
    chosen: str = ""


def _place(root: Any, steps: Path) -> _Place:
    """The place that pydantic's steps lead to: names, indices, and labels of union members."""
    place = _Place((), root)
    for number, step in enumerate(steps):
        members, tags = members_of(place.kind), tags_of(place.kind)
        if tags:
            place = replace(place, kind=tags[str(step)], union=place.kind, chosen=str(step))
        elif len(members) == 1:
            place = _Place((*place.path, step), _below(members[0], step), place)
        elif number < len(steps) - 1:
            kind = next((member for member in members if _is_label(str(step), member)), Any)
            place = replace(place, kind=kind)
    return place


def _fault(type_: str, place: _Place, context: Mapping[str, Any]) -> Fault:
    holder, tag = place.holder, tag_of(place.kind)
    if tag is not None and type_.startswith("union_tag"):
        choices: Any = Literal
        return Fault(type_, (*place.path, tag), choices[tuple(tags_of(place.kind))])
    if type_ == "missing" and holder is not None and isinstance(place.path[-1], int):
        return Fault("too_short", holder.path, holder.kind)
    fault = Fault(type_, place.path, place.kind, str(context.get("error", "")))
    if fault.is_unknown_key and holder is not None and holder.union is not None:
        return replace(fault, advice=_advice(fault, holder))
    return fault


def _advice(fault: Fault, section: _Place) -> str:
    """What to do about a key of a section that only other choices of its tag have; empty where none has it."""
    name, tag = str(fault.path[-1]), f"{'.'.join(map(str, section.path))}.{tag_of(section.union)}"
    others = [choice for choice, member in tags_of(section.union).items() if name in type_hints(member)]
    if not others:
        return ""
    return (
        f"{fault.key} is a key of {' and '.join(others)}, but {tag} is {section.chosen}; remove it, or set {tag} to "
        f"{' or '.join(others)}"
    )


def _below(member: Any, step: str | int) -> Any:
    """The type of one field, item or entry of a dataclass, list or mapping."""
    arguments = get_args(member)
    if is_dataclass(member):
        hints: Any = type_hints
        return hints(member).get(step)
    if isinstance(step, str):
        return arguments[1] if arguments else Any
    is_fixed = get_origin(member) is tuple and arguments[-1] is not ...
    return arguments[step if is_fixed else 0]


def _is_label(label: str, member: Any) -> bool:
    """Whether pydantic calls a union's member so, such as constrained-int or tuple[str, ...]."""
    family = get_origin(member) or member
    return label.partition("[")[0].rpartition("-")[2] == ("literal" if family is Literal else family.__name__)


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
        return f"write its keys below {key}:, one a line, or {{name: value}}"
    if given.value is None:
        return "write a value, or leave the key out" + (', or "" for empty text' if str in families else "")
    return f"write {choices[0]}" if choices else f"write one such as {_example(families)}"


def _example(families: Sequence[Any]) -> str:
    examples = {int: "8", float: "0.5", bool: "true", str: "name"}
    return next((examples[family] for family in families if family in examples), "null")
