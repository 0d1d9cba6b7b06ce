"""Names from other trainers: each means here what it means there, or is refused with the right key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from spmdrl.config.alias_rules import RELATIONS, RULES, WITH_KEY
from spmdrl.config.given import Given, inline, show
from spmdrl.config.key_names import Alias, Convert, Settings


def _by_values(row: Mapping[str, Any]) -> Convert:
    """Return the conversion of a row of aliases.yaml that lists values."""
    key, values = row["key"], row["values"]
    way_out = row.get("advice", f"{key} may have other values")

    def convert(given: Given, settings: Settings) -> dict[str, Any]:
        value = given.value if isinstance(given.value, bool) else given.text
        if value not in values:
            choices = [inline(name) for name in values]
            words = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
            raise ValueError(f"is {show(given)}, but must be {words}; {way_out}")
        return {key: values[value]}

    return convert


def _conversion(row: Mapping[str, Any]) -> Convert | None:
    rule = row.get("read")
    if rule is None:
        return _by_values(row) if "values" in row else None
    if "values" in row:
        return partial(RULES[rule], choose=_by_values(row))
    return partial(RULES[rule], key=row["key"]) if RULES[rule] in WITH_KEY else RULES[rule]


def _aliases_of(row: Mapping[str, Any]) -> Iterator[tuple[list[str], bool, Alias]]:
    """Yield a row's names with the trainers that use each, and True for those read from a trainer's own files only."""
    convert, values = _conversion(row), row.get("values", {})
    here = row.get("here") or ", ".join(f"{inline(name)}: {inline(value)}" for name, value in values.items())
    is_related = "read" in row and RULES[row["read"]] in RELATIONS
    is_flag = True in values or "there" in row and row["there"].startswith("whether")
    for entry in row["names"].split():
        trainers, name = entry.split(":")
        own = name.startswith("~")
        alias = Alias(
            *(row["key"], trainers.replace(",", ", "), row["there"], here, convert, is_related),
            *(row.get("verbs", ""), is_flag, name.removeprefix("~"), "here" in row and not values),
        )
        yield trainers.split(","), own, alias


# By libyaml, which takes a seventh of the time.
_DATA = yaml.load(Path(__file__).with_name("aliases.yaml").read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
_ROWS = [found for row in _DATA["aliases"] for found in _aliases_of(row)]
ALIASES: Mapping[str, Alias] = {alias.name: alias for _, is_own, alias in _ROWS if not is_own}
MARKS: Mapping[str, Sequence[str]] = _DATA["trainers"]
"""trainers whose configurations `convert` reads, with names and words by which each is known"""
OWN_NAMES: Mapping[str, Mapping[str, Alias]] = {
    trainer: {alias.name: alias for trainers, is_own, alias in _ROWS if is_own and trainer in trainers}
    for trainer in MARKS
}
"""names that are read in a trainer's own files alone, as they mean something else elsewhere"""
ADVICE: Mapping[str, str] = {name: answer for names, answer in _DATA["advice"] for name in names.split()}
"""names that have no key here, with what to do instead"""
NEEDLESS: Mapping[str, str] = {name: reason for names, reason in _DATA["needless"] for name in names.split()}
"""names, or NAME=VALUE, for which there is nothing to set, with the reason"""
DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = _DATA["defaults"]
"""defaults of trainers that differ from ours, by trainer, verb and name"""
