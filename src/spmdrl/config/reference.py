"""What the pages that list names are made of, from the code itself."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

from spmdrl.config.aliases import ALIASES
from spmdrl.config.given import inline
from spmdrl.config.key_names import KnownNames, spellings_of
from spmdrl.config.key_schema import Key, describe, own_keys, schema, schema_keys, tag_of, tags_of
from spmdrl.config.wished import WISHED

_WIDTH = 110


def known_names(root: type[Any]) -> KnownNames:
    """All names of a configuration."""
    return KnownNames(schema_keys(root), spellings_of(ALIASES), WISHED)


def find_key(root: type[Any], name: str) -> Key | None:
    """The entry of a dotted key, or None where there is none."""
    return next((key for key in schema(root) if key.name == name), None)


def key_groups(section: Key) -> Iterator[tuple[str, list[Key]]]:
    """The keys of a section; where its tag chooses what they are, those of each choice under it, as in name=value."""
    tag, choices = tag_of(section.kind), tags_of(section.kind) or {"": section.sections[0]}
    for choice, owner in choices.items():
        base = section.default if isinstance(section.default, owner) else None
        yield f"{section.name}.{tag}={choice}" if tag else "", list(own_keys(owner, section.name, base))


def key_page(root: type[Any], names: KnownNames, name: str) -> str | None:
    """What there is to say about a key, a section, an alias or a name that isn't here; None for an unknown name."""
    entry = find_key(root, name)
    if entry is not None:
        lines = _section_lines(entry) if entry.sections else _key_lines(entry)
        return "\n".join(lines) + "\n"
    alias = names.spellings.get(name)
    if alias is not None:
        return "\n".join(_alias_lines(root, name)) + "\n"
    wish = names.wish(name)
    return None if wish is None else f"{name} isn't here: {wish}\n"


def _key_lines(key: Key) -> Iterator[str]:
    yield f"{key.name}: {describe(key.kind)}; default {_default_text(key)}"
    yield from _wrapped(key.text)
    section, _, name = key.name.rpartition(".")
    in_file = f"{section}: {{{name}: VALUE}}" if section else f"{name}: VALUE"
    yield f"  set it by {key.name}=VALUE on the command line, or in a file by {in_file}"
    also = [f"{name} ({alias.origin})" for name, alias in ALIASES.items() if alias.key == key.name]
    if also:
        yield from _wrapped(f"read under other names too: {', '.join(also)}")
    yield f"  defined in {key.owner.__module__}.{key.owner.__qualname__}"


def _section_lines(section: Key) -> Iterator[str]:
    yield f"{section.name}: a section"
    yield from _wrapped(section.text)
    for heading, keys in key_groups(section):
        yield from [f"  with {heading}:"] if heading else []
        for key in keys:
            yield f"  {key.name} ({'a section' if key.sections else _default_text(key)})"
            yield from _wrapped(key.text, indent="      ")


def _alias_lines(root: type[Any], name: str) -> Iterator[str]:
    alias = spellings_of(ALIASES)[name]
    here = f" ({alias.here})" if alias.here else ""
    yield f"{name}: {alias.origin}'s name for {alias.there}; it sets {alias.key}{here}"
    yield ""
    key = find_key(root, alias.key)
    assert key is not None, alias.key
    yield from _key_lines(key)


def _default_text(key: Key) -> str:
    return "none" if key.default is MISSING else inline(key.default)


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def alias_table() -> Iterator[str]:
    """The lines of the Markdown table of all aliases."""
    yield "| name | known from | what it means there | what it sets here |"
    yield "|---|---|---|---|"
    for name, alias in sorted(ALIASES.items()):
        here = f"`{alias.key}`" + (f": {alias.here}" if alias.here else "")
        yield f"| `{name}` | {alias.origin} | {alias.there} | {here} |"
