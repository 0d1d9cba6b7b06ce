"""The keys of a tree of frozen dataclasses, their types in words, and pydantic's view of the tree.

A field's type may be int, float, bool, str, Literal, tuple[X, ...], list, dict[str, Any], a dataclass, a union of
those, with bounds as Annotated[int, Ge(1)]. In Annotated[A | B, ChosenBy("name")], the key `name` chooses between
dataclasses.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from spmdrl.config.given import joined

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class ChosenBy:
    """Marks a union of dataclasses among which the value of one key chooses, as pydantic's Field(discriminator=...)."""

    discriminator: str

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Imported by what validates: `help KEY` takes three quarters of the time without it.
        from pydantic import Field

        return handler.generate_schema(Annotated[union, Field(discriminator=self.discriminator)])


@cache
def adapter(root: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of a list with one tree; an adapter of a dataclass itself takes no configuration."""
    # Most of the time that the command line takes to start would be this import.
    from pydantic import ConfigDict, TypeAdapter

    holder: Any = types.GenericAlias(tuple, (root,))
    return TypeAdapter(holder, config=ConfigDict(extra="forbid"))


@dataclass(frozen=True)
class Key:
    """One key or section of a schema."""

    name: str
    """dotted"""
    kind: Any
    owner: Any
    default: object
    """MISSING if the key is required"""

    @property
    def sections(self) -> tuple[Any, ...]:
        """Dataclasses that the key may hold: one, or the choices of a tag; none if it holds a value."""
        members = members_of(self.kind)
        is_section = all(map(is_dataclass, members)) and (len(members) == 1 or tag_of(self.kind) is not None)
        return members if is_section else ()

    @property
    def text(self) -> str:
        """Text under the field, in the first class that has one."""
        own = map(_own_texts, self.owner.__mro__)
        return next((texts[self.last] for texts in own if self.last in texts), "")

    @property
    def section(self) -> str:
        """Name of its section, empty at the top."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """Name without its section."""
        return self.name.rpartition(".")[2]

    @property
    def base(self) -> Any:
        """Class that defines the key, which may be a base of its owner."""
        return next(base for base in self.owner.__mro__ if self.last in getattr(base, "__annotations__", ()))

    def is_like(self, other: Key) -> bool:
        """Return True if both keys have the same type, default and text."""
        facts, others = (self.name, self.kind, self.default), (other.name, other.kind, other.default)
        return facts == others and (self.base is other.base or self.text == other.text)


def own_keys(owner: Any, prefix: str = "", base: object = None) -> Iterator[Key]:
    """Yield the fields of a dataclass as keys below `prefix`; a `base` gives their defaults."""
    for entry in fields(owner):
        if entry.init:
            own = entry.default if entry.default_factory is MISSING else entry.default_factory()
            default = own if base is None else getattr(base, entry.name)
            yield Key(joined(prefix, entry.name), type_hints(owner)[entry.name], owner, default)


def key_groups(section: Key) -> dict[str, list[Key]]:
    """Return the keys of a section: common ones of all its choices, and under 'key=value' those of one choice."""
    tag, choices = tag_of(section.kind), tags_of(section.kind)
    if tag is None:
        return {"": [key for owner in section.sections for key in _keys_below(section, owner)]}
    groups = {f"{section.name}.{tag}={choice}": _keys_below(section, owner) for choice, owner in choices.items()}
    first = next(iter(groups.values()))
    alike = {key.name for key in first if all(any(key.is_like(other) for other in keys) for keys in groups.values())}
    tag_key = next(key for key in first if key.name == f"{section.name}.{tag}")
    default = getattr(section.default, tag, MISSING)
    shared = [replace(tag_key, kind=Literal[tuple(choices)], default=default)]
    shared += [key for key in first if key.name in alike]
    own = {choice: [key for key in keys if key.name not in alike | {tag_key.name}] for choice, keys in groups.items()}
    return {"": shared} | own


def _keys_below(section: Key, owner: Any) -> list[Key]:
    return list(own_keys(owner, section.name, section.default if isinstance(section.default, owner) else None))


def schema(root: Any, towards: str | None = None) -> tuple[Key, ...]:
    """Return every key of a tree, sections included; a key that several choices of a union share comes once per
    choice. With the name of a key, only sections that hold it are entered."""
    return _schema(root, towards)


@cache
def _schema(root: Any, towards: str | None) -> tuple[Key, ...]:
    return tuple(found for key in own_keys(root) for found in _with_keys_below(key, towards))


def _with_keys_below(key: Key, towards: str | None) -> Iterator[Key]:
    yield key
    if towards is None or towards.startswith(f"{key.name}."):
        for below in chain(*key_groups(key).values()):
            yield from _with_keys_below(below, towards)


def schema_keys(root: Any) -> tuple[str, ...]:
    """Return every dotted key of a tree, sections included."""
    return tuple(dict.fromkeys(key.name for key in schema(root)))


@cache
def type_hints(owner: Any) -> Mapping[str, Any]:
    """Return the types of a dataclass' fields, with their bounds."""
    return get_type_hints(owner, include_extras=True)


def bare(kind: Any) -> Any:
    """Return a type without its bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union without null; any other type is its own member."""
    kind = bare(kind)
    if get_origin(kind) not in (Union, types.UnionType):
        return (kind,)
    return tuple(member for member in map(bare, get_args(kind)) if member is not type(None))


def tag_of(kind: Any) -> str | None:
    """Return the key whose value chooses a member of this union; None if it has no tag."""
    return next((tag for extra in _extras(kind) if (tag := getattr(extra, "discriminator", None))), None)


def tags_of(kind: Any) -> dict[str, Any]:
    """Return each value of the tag with its dataclass."""
    tag = tag_of(kind)
    if tag is None:
        return {}
    return {name: member for member in members_of(kind) for name in get_args(type_hints(member)[tag])}


def describe(kind: Any) -> str:
    """Return a type in words."""
    own = bare(kind)
    family, arguments = get_origin(own) or own, get_args(own)
    if family in (Union, types.UnionType):
        words = " or ".join(describe(member) for member in arguments)
    elif family is Literal:
        words = "one of " + ", ".join(map(str, arguments)) if len(arguments) > 1 else str(arguments[0])
    elif family in (tuple, list):
        words = _describe_list(family, arguments)
    elif is_dataclass(own):
        words = "a mapping with keys of " + ", ".join(entry.name for entry in fields(own))
    else:
        words = "a mapping" if family is dict else _SCALARS.get(own, "any value")
    return f"{words} {bounds}" if own is not kind and (bounds := describe_bounds(kind)) else words


def _describe_list(family: type[Any], arguments: tuple[Any, ...]) -> str:
    if not arguments:
        return "a list"
    if family is list or arguments[-1] is ...:
        return f"a list, each item {describe(arguments[0])}"
    return f"a list of {len(arguments)}: " + ", ".join(describe(item) for item in arguments)


def describe_bounds(kind: Any) -> str:
    """Return the bounds of a type, such as '> 0 and <= 1' or '>= 1 or null'; empty where it has none."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe_bounds(member) or describe(member) for member in get_args(kind))
    found = [(sign, getattr(extra, name, None)) for extra in _extras(kind) for name, sign in _BOUNDS.items()]
    given = [(sign, bound) for sign, bound in found if bound is not None]
    return " and ".join("finite" if bound == math.inf else f"{sign} {bound}" for sign, bound in given)


def _extras(kind: Any) -> tuple[Any, ...]:
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


@cache
def _own_texts(owner: Any) -> dict[str, str]:
    """Return the text under each field that a class itself has; none if its source isn't there."""
    texts: dict[str, str] = {}
    with suppress(OSError, TypeError):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        for entry, text in pairwise(getattr(tree, "body", ())):
            match entry, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    texts[name] = " ".join(words.split())
    return texts
