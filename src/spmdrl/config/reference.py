"""Reference of all keys, generated from the code: entries for `help KEY`, the Markdown page and the JSON schema."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from typing import Any

from spmdrl.config.aliases import ADVICE, ALIASES, NEEDLESS
from spmdrl.config.given import inline
from spmdrl.config.key_names import Alias, KnownNames, aliases_of_verb, spellings_of
from spmdrl.config.key_schema import Key, adapter, describe, key_groups, own_keys, schema, schema_keys
from spmdrl.config.verb_keys import OWN

_WIDTH = 110
_LONGEST_DEFAULT = 60
_PAGE_HEAD = """\
# Keys of a configuration

This page is generated from the code: `python -m spmdrl help --markdown > docs/config.md`. `python -m spmdrl help KEY`
prints one entry, and [aliases.md](aliases.md) has the rules of other trainers' names, which are read too.

A key is set in a YAML file (`optim: {lr: 1e-6}`), or on the command line (`optim.lr=1e-6`), which wins over files; of
several files the later ones win. A key that isn't here is refused, and the nearest one named. `python -m spmdrl check
FILE.yaml --all` prints every key with its value and where that comes from; a run keeps the same list in its folder, as
`config.resolved.yaml`.

Each verb reads its own keys: `sft` learns at `sft.optim.lr`, not at `optim.lr`. A key that the verb doesn't read is
refused with the one that it reads. One file may serve several verbs: beside `train.max_steps`, `sft.max_steps`,
`preferences.max_steps` or `reward_model.max_steps` (or `epochs` there) it may have all keys of that verb, and so may a
command line with the steps of both; `eval` and `generate` take the file of any run. The start then prints what isn't
read.

[config.schema.json](config.schema.json) (`help --schema`) holds the same as JSON schema. Editors with a YAML language
server complete and check the keys of files that begin with a line such as

```yaml
# yaml-language-server: $schema=../../docs/config.schema.json
```
""".splitlines()


def known_names(root: type[Any]) -> KnownNames:
    """Return all names of a configuration."""
    return KnownNames(schema_keys(root), spellings_of(ALIASES), ADVICE, NEEDLESS)


def find_keys(root: type[Any], name: str) -> list[Key]:
    """Return a dotted key's entries: none if there is no such key, several if choices of a union differ in it."""
    return [key for key in schema(root, towards=name) if key.name == name]


def key_page(root: type[Any], name: str) -> str | None:
    """Return the entry of a key, a section, an alias or a name with advice; None for an unknown name."""
    entries = [_section_lines(key) if key.sections else _key_lines(key) for key in find_keys(root, name)]
    if entries:
        return "\n".join("\n".join(lines) + "\n" for lines in entries)
    names = known_names(root)
    if alias := names.spellings.get(name):
        return "\n".join(_alias_lines(root, name, alias)) + "\n"
    if name in names.needless:
        return f"{name}: nothing to set: {names.needless[name]}\n"
    advice = names.known_advice(name)
    return None if advice is None else f"{name} isn't here: {advice}\n"


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
    for choices, keys in _shown_groups(section).items():
        yield from [f"  with {choices}:"] if choices else []
        for key in keys:
            yield f"  {key.name} ({'a section' if key.sections else _default_text(key)})"
            yield from _wrapped(key.text, indent="      ")


def _shown_groups(section: Key) -> dict[str, list[Key]]:
    """Return a section's keys by choice; common keys come once, under `key=one, other`, widest groups first."""
    (_, shared), *own = key_groups(section).items()
    by_choices: dict[tuple[str, ...], list[Key]] = {}
    for _, keys in own:
        for key in keys:
            choices = tuple(choice for choice, others in own if any(key.is_like(other) for other in others))
            known = by_choices.setdefault(choices, [])
            known += [] if any(key.is_like(other) for other in known) else [key]
    widest_first = sorted(by_choices.items(), key=lambda item: -len(item[0]))
    return {"": shared} | {_together(choices): keys for choices, keys in widest_first}


def _together(choices: Sequence[str]) -> str:
    """Join choices of one tag."""
    first, *others = choices
    return ", ".join([first, *(other.partition("=")[2] for other in others)])


def _alias_lines(root: type[Any], name: str, alias: Alias) -> Iterator[str]:
    here = f" ({alias.here})" if alias.here else ""
    yield f"{name}: {alias.origin}'s name for {alias.there}; it sets {alias.key}{here}"
    keys = schema_keys(root)
    for verb in OWN:
        if (own := aliases_of_verb({name: alias}, verb, keys).get(name)) is not None:
            yield f"  in {verb} it sets {own.key}"
    yield ""
    for key in find_keys(root, alias.key):
        yield from _key_lines(key)


def _default_text(key: Key) -> str:
    return "none" if key.default is MISSING else inline(key.default)


def _wrapped(text: str, indent: str = "  ", width: int = _WIDTH) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def config_page(root: type[Any]) -> Iterator[str]:
    """Yield the lines of the Markdown page of all keys."""
    yield from _PAGE_HEAD
    top = list(own_keys(root))
    yield from ["", "## Top level", ""]
    yield from (line for key in top if not key.sections for line in _key_item(key))
    # Keys that sections inherit from one base are listed in the first section that is always of one class.
    listed: dict[Any, Key] = {}
    for key in (key for section in top if len(section.sections) == 1 for key in key_groups(section)[""]):
        listed.setdefault((key.base, key.last, repr(key.default)), key)
    for section in top:
        yield from _section_part(section, "##", listed) if section.sections else ()


def _section_part(section: Key, level: str, listed: dict[Any, Key]) -> Iterator[str]:
    """Yield the lines of a section; one whose class is already listed refers to it."""
    yield from ["", f"{level} {section.name}", "", f"{section.text[:1].upper()}{section.text[1:].rstrip('.')}.", ""]
    known = listed.setdefault(section.sections, section)
    if known is not section:
        yield from _wrapped(_as_listed(section, known), indent="", width=120)
        return
    groups = _shown_groups(section)
    for choices, keys in groups.items():
        yield from ["", f"With `{choices}`:", ""] if choices and keys else ()
        values = [key for key in keys if not key.sections]
        homes = {key.name: listed.get((key.base, key.last, repr(key.default)), key).section for key in values}
        yield from (line for key in values if homes[key.name] == section.name for line in _key_item(key))
        for home in dict.fromkeys(home for home in homes.values() if home != section.name):
            names = ", ".join(f"`{name}`" for name, other in homes.items() if other == home)
            yield from _wrapped_item(f"- {names}: as in [{home}](#{home}).")
    for key in (key for keys in groups.values() for key in keys if key.sections):
        yield from _section_part(key, level + "#", listed)


def _as_listed(section: Key, known: Key) -> str:
    """Return a reference from a section to another one of its class, with its different defaults."""
    theirs = {key.last: key.default for key in key_groups(known)[""]}
    own = [key for key in key_groups(section)[""] if key.default != theirs[key.last]]
    other = [f"`{key.last}` has the default `{_default_text(key)}`" for key in own]
    return "; ".join([f"Keys as in [{known.name}](#{known.name.replace('.', '')})", *other]) + "."


def _key_item(key: Key) -> list[str]:
    default = _default_text(key)
    default = f"`{default}`" if len(default) < _LONGEST_DEFAULT else f"{len(default)} characters"
    text = key.text.rstrip(".").replace("<", "&lt;").replace("*", "\\*")
    also = ", ".join(f"`{name}` ({alias.origin})" for name, alias in ALIASES.items() if alias.key == key.name)
    item = f"- `{key.name}` ({describe(key.kind)}; default {default}): {text}." + (f" Also {also}." if also else "")
    return _wrapped_item(item)


def _wrapped_item(item: str) -> list[str]:
    return textwrap.wrap(item, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def json_schema(root: Any) -> dict[str, Any]:
    """Build the JSON schema of a configuration file; no key is required, as several files may make one
    configuration."""
    classes = _for_files(adapter(root).json_schema()["$defs"])
    for owner in {key.owner for key in schema(root)}:
        for key in own_keys(owner):
            classes[owner.__name__]["properties"][key.last]["description"] = key.text
    for spelling, alias in spellings_of(ALIASES).items():
        section, _, name = spelling.rpartition(".")
        # Other trainers' sections have none here.
        for owner in [root] if not section else [one for key in find_keys(root, section)[:1] for one in key.sections]:
            described = {"description": f"{alias.origin}: {alias.there}; sets {alias.read_as}"}
            classes[owner.__name__]["properties"].setdefault(name, described)
    # At the top of a file, a key may be written with the names of its sections before it.
    whole = classes.pop(root.__name__) | {"patternProperties": {r"^\w+\.": {}}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | whole | {"$defs": classes}


def _for_files(definition: Any) -> Any:
    """Adapt pydantic's JSON schema to files: values in part, and numbers where text is expected."""
    if not isinstance(definition, dict):
        return [_for_files(entry) for entry in definition] if isinstance(definition, list) else definition
    if "properties" in definition:
        properties = {name: _for_files(entry) for name, entry in definition["properties"].items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}
    # JSON has no infinity, and a number in it is finite.
    left_out = [name for name, entry in definition.items() if name in ("title", "discriminator") or entry == math.inf]
    kept = {name: _for_files(entry) for name, entry in definition.items() if name not in left_out}
    # Without its tag, a section may fit several members of a union.
    if "oneOf" in kept:
        kept["anyOf"] = kept.pop("oneOf")
    return kept | {"type": ["string", "number", "boolean"]} if kept.get("type") == "string" else kept
