"""Names that aren't keys: other trainers' names, read as keys, and unknown ones, with advice.

An alias may convert its value if the other name counts something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from spmdrl.config.given import DEFAULT, Given, find, given_of, inline, leaves, plant, replant, within
from spmdrl.config.verb_keys import counterpart, is_read
from spmdrl.observability.terminal.spelling import edit_distance, nearest

# Sections of other trainers that say nothing more of a name within; those of a critic, a reference or a validation do.
_FOREIGN_SECTIONS = (
    *("actor_rollout_ref", "actor", "trainer", "algorithm", "grpo", "dpo", "loss_fn", "policy", "checkpointing"),
    *("orchestrator", "ckpt", "vllm", "ds", "fsdp_config", "generation", "vllm_cfg", "optimizer", "kwargs"),
    *("tokenizer", "engine", "kl_ctrl", "logger", "dtensor_cfg"),
)


@dataclass(frozen=True)
class Settings:
    """All sources together, by canonical keys, with the defaults of the other keys."""

    tree: dict[str, Given]
    verb: str | None = None
    """verb that reads them; its unread keys have no value"""
    keys: Sequence[str] = ()

    def home(self, key: str) -> str:
        """Return the key of the verb's own section in place of one that the verb doesn't read, if there is one."""
        is_ours = not self.verb or is_read(self.verb, key)
        return key if is_ours else counterpart(str(self.verb), key, self.keys, own=True) or key

    def _find(self, key: str) -> Given | None:
        # Names of rules stay whole.
        return self.tree.get(key) or find(self.tree, tuple(key.split(".")))

    def is_given(self, key: str) -> bool:
        """Return True if a source sets the key, or the name of a rule that isn't converted yet."""
        given = self._find(key)
        return given is not None and given.origin != DEFAULT

    def value(self, key: str) -> Any:
        """Return the key's written value, or its default, or None."""
        given = self._find(key)
        is_hidden = given is None or (self.verb and key in self.keys and not is_read(self.verb, key))
        return None if given is None or is_hidden else given.plain


Convert: TypeAlias = Callable[[Given, Settings], dict[str, Any]]
"""Conversion of a written value to canonical keys and values; raises ValueError with the rest of a sentence that begins
with the alias."""


@dataclass(frozen=True)
class Alias:
    """Another name for `key`.

    `convert` runs once all sources are read; it sets `key`, and other keys that no source sets.
    """

    key: str
    origin: str = ""
    """trainers that use the name"""
    there: str = ""
    """meaning there"""
    here: str = ""
    """settings here, if more than `key`"""
    convert: Convert | None = None
    is_relation: bool = False
    """True if it relates several keys, and may be given beside each of them"""
    verbs: str = ""
    """verbs with a section of their own: all, whose conversion is the same; own, for which it is no name; else it is a
    name without conversion"""
    is_flag: bool = False
    """True if it may be true, which `--name` alone sets"""
    name: str = ""
    says_more: bool = False
    """True if `here` is more than a table of values"""

    @property
    def read_as(self) -> str:
        return f"{self.key} ({self.here})" if self.here else self.key


@dataclass(frozen=True)
class WrittenKey:
    """A written value under its canonical name, with the alias used for it."""

    parts: tuple[str, ...]
    given: Given
    spelling: str
    alias: Alias | None

    @property
    def key(self) -> str:
        """Canonical key."""
        return self.alias.key if self.alias is not None and self.alias.is_relation else ".".join(self.parts)

    @property
    def convert(self) -> Convert | None:
        return None if self.alias is None else self.alias.convert


def spellings_of(aliases: Mapping[str, Alias]) -> dict[str, Alias]:
    """Return every spelling of the aliases: one without a dot is also read inside the section of its key."""
    spellings = {}
    for name, alias in aliases.items():
        section = alias.key.rpartition(".")[0]
        if "." not in name and section:
            spellings[f"{section}.{name}"] = alias
        spellings[name] = alias
    return spellings


def aliases_of_verb(aliases: Mapping[str, Alias], verb: str, keys: Sequence[str]) -> dict[str, Alias]:
    """Return the aliases that a verb reads as keys of its own section."""
    unread = {name: alias for name, alias in aliases.items() if alias.verbs != "own" and not is_read(verb, alias.key)}
    own = {name: counterpart(verb, alias.key, keys, own=True) for name, alias in unread.items()}
    found = {}
    for name, alias in unread.items():
        if own[name] is not None:
            kept = alias if alias.verbs == "all" else replace(alias, convert=None, is_relation=False)
            found[name] = replace(kept, key=str(own[name]), here="")
    return found


def convert_aliases(
    tree: dict[str, Given],
    written: list[WrittenKey],
    problems: list[str],
    verb: str | None = None,
    keys: Sequence[str] = (),
) -> dict[str, str]:
    """Put the converted values into the tree, add refusals to `problems`, and return each spelling's meaning."""
    used, settings = {}, Settings(tree, verb, keys)
    for entry in written:
        assert entry.convert is not None, entry.spelling
        replant(tree, entry.parts, None)
        if verb and not is_read(verb, entry.key):
            continue
        try:
            converted = entry.convert(entry.given, settings)
        except ValueError as error:
            problems.append(f"{entry.given.origin}: {entry.spelling} {error}")
            continue
        own = ".".join(entry.parts)
        converted = {settings.home(key): value for key, value in converted.items()}
        values = {key: value for key, value in converted.items() if key == own or not settings.is_given(key)}
        for key, value in values.items():
            plant(tree, tuple(key.split(".")), given_of(value, entry.given.origin))
        used[entry.spelling] = ", ".join(f"{key}={inline(value)}" for key, value in values.items()) or "nothing set"
    return used


@dataclass(frozen=True)
class KnownNames:
    """Keys of a configuration, their other spellings, and advice for names that users look for."""

    keys: Sequence[str]
    spellings: Mapping[str, Alias]
    advice_by_name: Mapping[str, str]
    needless: Mapping[str, str] = field(default_factory=dict)
    """names, or NAME=VALUE, for which there is nothing to set, with the reason"""
    flags: Collection[str] = ()
    """keys that are true or false"""

    def reason_to_drop(self, key: str, given: Given) -> str | None:
        """Return why there is nothing to set for a name with this value; None for other names."""
        # Inside the section of its key an alias has the same values.
        names = [key, self.spellings[key].name] if key in self.spellings else [key]
        found = (self.needless.get(f"{name}={given.text}".lower(), self.needless.get(name)) for name in names)
        return next((reason for reason in found if reason), None)

    def flag_value(self, key: str) -> tuple[str, str] | None:
        """Return the name and value of a flag without a value: `--name` or, for false, `--no_name`; None for others."""
        for start, text in (("", "true"), ("no_", "false")):
            name = self.without_sections(key.removeprefix(start))
            is_flag = name in self.flags or name in self.spellings and self.spellings[name].is_flag
            if key.startswith(start) and (is_flag or name in self.needless or f"{name}={text}" in self.needless):
                return name, text
        return None

    def advice(self, key: str) -> str:
        """Return advice for an unknown key."""
        advice = self.known_advice(key)
        if advice is not None:
            return advice
        near = self.near(key)
        if near:
            return f"did you mean {' or '.join(near)}?"
        section = key.rpartition(".")[0]
        section = section if section in self.keys else ""
        beside = [name.rpartition(".")[2] for name in self.keys if name.rpartition(".")[0] == section]
        return f"the keys of {section or 'the top level'} are {', '.join(beside)}"

    def without_sections(self, key: str) -> str:
        """Strip sections of other trainers, as in actor_rollout_ref.rollout.n, from a name."""
        first, _, rest = key.partition(".")
        if self._is_name(key) or first not in _FOREIGN_SECTIONS:
            return key
        inner = self.without_sections(rest)
        return inner if self._is_name(inner) else key

    def _is_name(self, name: str) -> bool:
        known = (self.keys, self.spellings, self.needless_names, self.advice_by_name)
        return any(name in names for names in known)

    @cached_property
    def needless_names(self) -> frozenset[str]:
        """Names for some value of which there is nothing to set."""
        return frozenset(name.partition("=")[0] for name in self.needless)

    def is_section(self, parts: Sequence[str]) -> bool:
        """Return True if keys or other spellings of them are below these names; without names, always."""
        start = "".join(f"{part}." for part in parts)
        return any(name.startswith(start) for name in (*self.keys, *self.spellings))

    def is_known(self, key: str) -> bool:
        """Return True for a key, and for names below a key that holds any mapping."""
        names = key.split(".")
        starts = [".".join(names[:length]) for length in range(len(names), 0, -1)]
        known = next((start for start in starts if start in self.keys), None)
        return known == key or known is not None and not any(name.startswith(f"{known}.") for name in self.keys)

    def known_advice(self, key: str) -> str | None:
        """Return the advice for a name without a key, unless another section has such a key."""
        *sections, last = key.split(".")
        if key in self.advice_by_name:
            return self.advice_by_name[key]
        if self._named(last) or self._ends_of(key):
            return None
        return next((self.advice_by_name[name] for name in (last, *sections) if name in self.advice_by_name), None)

    def near(self, key: str) -> list[str]:
        """Return the likely meanings of a misspelt key: the same name in another section first, then similar ones."""
        ends, (section, _, last) = self._ends_of(key), key.rpartition(".")
        if ends:
            return ends
        same = self._named(last)
        if same:
            return sorted(same, key=lambda name: edit_distance(name, key))[:3]
        beside = [name for name in self.keys if section and within(name, section) and name != section]
        for known in (beside, [*self.keys, *self.spellings]):
            by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
            match = nearest(last, by_last)
            if match is not None:
                return [self._key_of(by_last[match])]
        # Without sections: a wrong one hides a right key, and a right one makes all its keys look similar.
        match = None if section in self.keys else nearest(key, [*self.keys, *self.spellings])
        return [] if match is None else [self._key_of(match)]

    def meant(self, unknown: str) -> list[str]:
        """Return the keys that an unknown one may mean: the nearest, or any of its section."""
        section = unknown.rpartition(".")[0]
        beside = [name for name in self.keys if section and name.rpartition(".")[0] == section]
        return [*self.near(unknown), *beside]

    def leaves_to_show(self, key: str, given: Given) -> Iterator[tuple[str, Given]]:
        """Yield an unknown section as one entry if one piece of advice covers it, else its entries."""
        inside = list(leaves(given)) if isinstance(given.value, dict) else []
        meant, answered = self.near(key), any(parts[-1] in self.advice_by_name for parts, _ in inside)
        if (
            (self.known_advice(key) and not answered)
            or not inside
            or any(f"{meant[0]}.{parts[0]}" in self.keys for parts, _ in inside if meant)
        ):
            yield key, given
            return
        for parts, leaf in inside:
            yield ".".join((key, *parts)), leaf

    def _named(self, last: str) -> list[str]:
        return [name for name in self.keys if name.rpartition(".")[2] == last]

    def _ends_of(self, key: str) -> list[str]:
        """Return the known name at the end of `key`, behind another trainer's sections."""
        names = key.split(".")
        ends = [".".join(names[start:]) for start in range(1, len(names))]
        return [self._key_of(end) for end in ends if end in self.keys or end in self.spellings][:1]

    def _key_of(self, name: str) -> str:
        return self.spellings[name].key if name in self.spellings else name
