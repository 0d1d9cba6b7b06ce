"""Conversion of a tree of written values to dataclasses, which collects every fault instead of raising the first."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from typing import Any

from pydantic import ValidationError

from spmdrl.config.faults import Fault, faults_of, message_of
from spmdrl.config.given import DEFAULT, Given, Path, find, given_of, leaves, replant, within
from spmdrl.config.key_schema import adapter, own_keys, tag_of, tags_of


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
