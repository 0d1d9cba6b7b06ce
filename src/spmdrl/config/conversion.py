"""A tree of written values to a tree of dataclasses, with every fault collected rather than the first one raised."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from typing import Any

from pydantic import ValidationError

from spmdrl.config.faults import Fault, faults_of
from spmdrl.config.given import DEFAULT, Given, Path, find, given_of, inline, leaves, replant, within
from spmdrl.config.key_schema import Key, adapter, own_keys, schema, tag_of, tags_of


def complete(entries: dict[str, Given], owner: Any, base: object = None) -> None:
    """Add what no source sets: the default of each key, and the sections that are required."""
    for key in own_keys(owner, base=base):
        given = entries.get(key.name)
        if given is None and key.default is not MISSING:
            entries[key.name] = given_of(key.default, DEFAULT)
            continue
        if given is None and key.kind in key.sections:
            given = entries[key.name] = Given({}, "", DEFAULT)
        if given is not None and isinstance(given.value, dict):
            section = _chosen(key, given.value)
            if section is not None:
                complete(given.value, section, key.default if isinstance(key.default, section) else None)


def _chosen(key: Key, entries: Mapping[str, Given]) -> Any:
    """The dataclass that these entries of a section are of."""
    tag = tag_of(key.kind)
    if tag is None or not key.sections:
        return next(iter(key.sections), None)
    if tag in entries:
        return tags_of(key.kind).get(entries[tag].text)
    return type(key.default) if is_dataclass(key.default) else None


@dataclass(frozen=True)
class Doubt:
    """A dataclass's refusal that rests on keys which no source sets: another fault may be the reason for it."""

    message: str
    keys: tuple[str, ...]


@dataclass
class Conversion:
    """What a tree was converted to, or what is wrong with it: problems, and unknown and missing keys."""

    root: Any
    tree: dict[str, Given]
    value: Any = None
    problems: list[str] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    unknown: list[tuple[str, Given]] = field(default_factory=list)
    missing: list[tuple[str, Any]] = field(default_factory=list)
    as_text: dict[Path, Given] = field(default_factory=dict)
    """values that YAML reads as numbers or truth values, for which the tree now has their text"""

    @property
    def origin(self) -> dict[str, str]:
        """The origin of each key that a value was written for, or that has a default."""
        return {".".join(parts): given.origin for parts, given in leaves(Given(self.tree, "", ""))}

    def repair(self, fault: Fault) -> bool:
        """Change the tree where it may hide other faults, or could be read another way; whether it can."""
        given = find(self.tree, fault.path)
        if given is None:
            return False
        if fault.is_unknown_key:
            replant(self.tree, fault.path, None)
            if fault.advice:
                self.problems.append(f"{given.origin}: {fault.advice}")
            else:
                self.unknown.append((fault.key, given))
            return True
        # Text is taken as it is written, so that a run may be called 12 or no; only an empty value is null.
        if fault.wants_text and isinstance(given.value, int | float):
            self.as_text[fault.path] = given
            replant(self.tree, fault.path, replace(given, value=given.text))
            return True
        return False

    def report(self, fault: Fault, wished: Mapping[str, str]) -> None:
        """Keep a fault as a message, a doubt or a missing key."""
        given = self.as_text.get(fault.path) or find(self.tree, fault.path)
        if fault.refusal:
            self._add_refusal(fault.refusal, fault.key)
        elif given is None:
            self.missing.append((fault.key, fault.kind))
        else:
            way_out = wished.get(f"{fault.key}={given.text.lower()}") or self._way_back(fault, given)
            self.problems.append(f"{given.origin}: {fault.message(given, way_out)}")

    def _way_back(self, fault: Fault, given: Given) -> str | None:
        """The default of a key where its value, or an item of it, is out of bounds, or a word in place of a number."""
        name = fault.key.partition("[")[0]
        keys = [key for key in schema(self.root) if key.name == name and key.default is not MISSING]
        # Members of a union may have the key with defaults of their own.
        defaults = [key.default for key in keys if key.owner is fault.owner] or [key.default for key in keys]
        if not defaults or any(default != defaults[0] for default in defaults):
            return None
        is_word = fault.type == "float_type" and isinstance(given.value, str) and not given.quoted
        start = "the default is" if fault.is_out_of_bounds else "write one such as" if is_word else None
        return start and f"{start} {inline(defaults[0])}"

    def _add_refusal(self, message: str, key: str) -> None:
        """A refusal by the dataclass itself, after the origins of the keys that it names, else of its section's."""
        origin, (_, dot, section) = self.origin, key.rpartition(".")
        if dot:
            # A class that several sections use names its keys as its usual section has them.
            message = re.sub(rf"(?<![\w.]){re.escape(section)}\.", f"{key}.", message)
        named = [name for name in origin if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w|\[)", message)]
        suspects = named or [name for name in origin if within(name, key)]
        written = [name for name in suspects if origin[name] != DEFAULT]
        unwritten = tuple(name for name in suspects if name not in written)
        if len(written) == 1:
            message = f"{origin[written[0]]}: {message}"
        elif written:
            message += " [" + "; ".join(f"{name} from {origin[name]}" for name in written) + "]"
        else:
            message = f"defaults: {message}"
        if unwritten:
            self.doubts.append(Doubt(message, unwritten))
        else:
            self.problems.append(message)


def convert(root: Any, tree: dict[str, Given], wished: Mapping[str, str]) -> Conversion:
    """A complete tree as a `root`; the tree is changed. `wished` has advice for `key=value` that a key doesn't take."""
    conversion = Conversion(root, tree)
    while True:
        # In JSON, a strict validator takes lists for tuples and mappings for dataclasses, but no text for numbers.
        document = json.dumps([Given(tree, "", "").plain])
        try:
            (conversion.value,) = adapter(root).validate_json(document, strict=True)
            return conversion
        except ValidationError as error:
            faults = faults_of(root, error)
        if not [fault for fault in faults if conversion.repair(fault)]:
            break
    for fault in faults:
        conversion.report(fault, wished)
    return conversion
