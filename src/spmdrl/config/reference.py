"""What the pages that list names are made of, from the code itself."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

from spmdrl.config.aliases import ALIASES
from spmdrl.config.renames import spellings_of
from spmdrl.config.unknown_names import KnownNames
from spmdrl.config.values import default_of, describe, schema_keys, section_type
from spmdrl.config.wished import WISHED
from spmdrl.config.yaml_nodes import inline

_WIDTH = 110


@dataclass(frozen=True)
class KeyEntry:
    """One key or section of a configuration, as its dataclass has it."""

    key: str
    kind: Any
    owner: type[Any]
    text: str
    """what stands on the line under the field"""

    @property
    def section(self) -> type[Any] | None:
        return section_type(self.kind)


def known_names(root: type[Any]) -> KnownNames:
    """All names of a configuration."""
    return KnownNames(list(schema_keys(root)), spellings_of(ALIASES), WISHED)


def find_key(root: type[Any], key: str) -> KeyEntry | None:
    """The entry of a dotted key, or None where there is none."""
    owner, entry = root, None
    for name in key.split("."):
        hints = get_type_hints(owner)
        if name not in hints:
            return None
        entry = KeyEntry(key, hints[name], owner, field_texts(owner).get(name, ""))
        owner = entry.section or object
    return entry


def field_texts(kind: type[Any]) -> dict[str, str]:
    """The text under each field of a dataclass and of those it inherits from, which Python itself drops."""
    bases = (base for base in reversed(kind.__mro__) if is_dataclass(base))
    return {name: text for base in bases for name, text in _own_field_texts(base).items()}


def _own_field_texts(kind: type[Any]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef), kind
    texts = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        text = below.value if isinstance(below, ast.Expr) else None
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            texts[field.target.id] = " ".join(text.value.split())
    return texts


def key_page(root: type[Any], names: KnownNames, name: str) -> str | None:
    """What there is to say about a key, a section, an alias or a name that isn't here; None for an unknown name."""
    entry = find_key(root, name)
    if entry is not None:
        lines = _section_lines(root, entry) if is_dataclass(entry.section) else _key_lines(root, entry)
        return "\n".join(lines) + "\n"
    alias = names.spellings.get(name)
    if alias is not None:
        return "\n".join(_alias_lines(root, name)) + "\n"
    wish = names.wish(name)
    return None if wish is None else f"{name} isn't here: {wish}\n"


def _key_lines(root: type[Any], entry: KeyEntry) -> Iterator[str]:
    yield f"{entry.key}: {describe(entry.kind)}; default {_default_text(root, entry.key)}"
    yield from _wrapped(entry.text)
    section, _, name = entry.key.rpartition(".")
    in_file = f"{section}: {{{name}: VALUE}}" if section else f"{name}: VALUE"
    yield f"  set it by {entry.key}=VALUE on the command line, or in a file by {in_file}"
    also = [f"{name} ({alias.origin})" for name, alias in ALIASES.items() if alias.key == entry.key]
    if also:
        yield from _wrapped(f"read under other names too: {', '.join(also)}")
    yield f"  defined in {entry.owner.__module__}.{entry.owner.__qualname__}"


def _section_lines(root: type[Any], entry: KeyEntry) -> Iterator[str]:
    assert entry.section is not None
    yield f"{entry.key}: a section"
    yield from _wrapped(entry.text or (inspect.getdoc(entry.section) or "").splitlines()[0])
    hints, texts = get_type_hints(entry.section), field_texts(entry.section)
    for name in (key.rpartition(".")[2] for key in schema_keys(root) if key.rpartition(".")[0] == entry.key):
        kind = "a section" if section_type(hints[name]) else _default_text(root, f"{entry.key}.{name}")
        yield f"  {entry.key}.{name} ({kind})"
        yield from _wrapped(texts.get(name, ""), indent="      ")


def _alias_lines(root: type[Any], name: str) -> Iterator[str]:
    alias = spellings_of(ALIASES)[name]
    here = f" ({alias.here})" if alias.here else ""
    yield f"{name}: {alias.origin}'s name for {alias.there}; it sets {alias.key}{here}"
    yield ""
    entry = find_key(root, alias.key)
    assert entry is not None, alias.key
    yield from _key_lines(root, entry)


def _default_text(root: type[Any], key: str) -> str:
    default = default_of(root, key)
    if is_dataclass(default):
        return "a section"
    return inline(list(default) if isinstance(default, tuple) else default)


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def alias_table() -> Iterator[str]:
    """The lines of the Markdown table of all aliases."""
    yield "| name | known from | what it means there | what it sets here |"
    yield "|---|---|---|---|"
    for name, alias in sorted(ALIASES.items()):
        here = f"`{alias.key}`" + (f": {alias.here}" if alias.here else "")
        yield f"| `{name}` | {alias.origin} | {alias.there} | {here} |"
