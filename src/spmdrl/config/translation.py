"""Translation of another trainer's configuration into ours, with what became of each of its keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from typing import Any

from spmdrl.config.aliases import ADVICE, ALIASES, DEFAULTS, MARKS, NEEDLESS, OWN_NAMES
from spmdrl.config.conversion import complete
from spmdrl.config.given import DEFAULT, Given, find, given_of, inline, leaves, plant
from spmdrl.config.key_names import Alias, KnownNames, Settings, WrittenKey, convert_aliases
from spmdrl.config.reader import canonical, known_names, yaml_lines
from spmdrl.config.verb_keys import is_read

TAKEN, CONVERTED, NEEDLESS_HERE, MISSING_HERE = "taken", "converted", "nothing to set", "no counterpart"
# By the last part of a script's or module's name, or a word behind trl; the first that one has decides.
_VERBS = {
    "train": r"(?<![a-z])(ppo|grpo|gspo|rloo|dapo|reinforce|rl)(?![a-z])",
    "preferences": r"(?<![a-z])dpo(?![a-z])",
    "sft": r"(?<![a-z])sft(?![a-z])",
    "reward-model": r"(?<![a-z])rm(?![a-z])|^reward$|reward_(model|train)",
}
_SECTIONS = {"grpo": "train", "dpo": "preferences", "sft": "sft", "rm": "reward-model"}


@dataclass(frozen=True)
class Fate:
    """Outcome for one key."""

    name: str
    written: str
    kind: str
    words: str
    is_default: bool = False
    """True for a default of the trainer that its configuration doesn't give"""


@dataclass(frozen=True)
class Translation:
    """A configuration of ours, and the fates of the keys that it comes from."""

    tree: Mapping[str, Given]
    fates: Sequence[Fate]

    def counts(self) -> Counter[str]:
        """Return the number of written keys of each kind."""
        return Counter(fate.kind for fate in self.fates if not fate.is_default)

    def text(self) -> str:
        """Return the configuration as YAML, each value with the name that it comes from."""
        found = {".".join(parts): given for parts, given in leaves(Given(dict(self.tree), "", ""))}
        plain = Given(dict(self.tree), "", "").plain
        return "\n".join(yaml_lines(plain, "", {key: given.origin for key, given in found.items()}, indent="")) + "\n"


def trainer_of(names: Collection[str], words: Collection[str]) -> str | None:
    """Return the trainer with most marks among names of settings and words of a command; None without any."""
    text = " ".join(words)
    marks = {
        trainer: sum(any(name == mark or name.startswith(f"{mark}.") for name in names) or mark in text for mark in own)
        for trainer, own in MARKS.items()
    }
    best = max(marks, key=lambda trainer: marks[trainer])
    return best if marks[best] else None


def verb_of(names: Collection[str], words: Sequence[str]) -> str:
    """Return the verb that a program's name, or the name of a section, stands for; train without any."""
    ends = [re.split(r"[/.]", re.sub(r"\.(py|\w*sh|slurm|sbatch|ya?ml|toml)$", "", word.lower()))[-1] for word in words]
    found = [verb for end in ends for verb, pattern in _VERBS.items() if re.search(pattern, end)]
    found += [verb for section, verb in _SECTIONS.items() if any(name.startswith(f"{section}.") for name in names)]
    return found[0] if found else "train"


def programs_of(words: Sequence[str]) -> list[str]:
    """Return what a command starts: modules, Python files, and the words between its variables and first option."""
    command = list(dropwhile(lambda word: re.match(r"\w+=", word), words))
    pairs = zip(["", *command], command, strict=False)
    named = [word for last, word in pairs if last in ("-m", "--module") or word.endswith(".py")]
    return [*named, *takewhile(lambda word: not word.startswith("--") and "=" not in word, command)]


def translate(
    root_type: type[Any], written: Sequence[tuple[str, Given]], trainer: str, verb: str, num_ranks: int
) -> Translation:
    """Translate names and values of a trainer into keys that a verb reads, for a job of `num_ranks` ranks."""
    aliases = {**ALIASES, **OWN_NAMES[trainer]}
    names = known_names(root_type, aliases, ADVICE, NEEDLESS, verb)
    fates: list[Fate] = []
    entries: dict[str, WrittenKey] = {}
    for name, given in written:
        fate = _without_key(name, given, names)
        if fate is None:
            entries |= _entry(name, given, names)
        else:
            fates.append(fate)
    given_names = set(entries)
    entries |= _left_defaults(trainer, verb, entries, names)
    order = {name: place for place, name in enumerate(aliases)}
    tree: dict[str, Given] = {"num_ranks": given_of(num_ranks, "the number of ranks")}
    settings = Settings(tree, verb, names.keys)
    first: dict[tuple[str, ...], str] = {}
    doubled: dict[str, tuple[WrittenKey, str]] = {}
    for name, entry in list(entries.items()):
        parts = entry.parts if entry.convert else tuple(settings.home(".".join(entry.parts)).split("."))
        if parts in first:
            doubled[name] = (entries.pop(name), first[parts])
            continue
        first[parts] = name
        plant(tree, parts, entry.given)
    complete(tree, root_type)
    plain = {name: entry for name, entry in entries.items() if entry.convert is None}
    for name, entry in plain.items():
        key = settings.home(".".join(entry.parts))
        kind = TAKEN if is_read(verb, key) else NEEDLESS_HERE
        words = f"{key}={inline(entry.given.plain)}" if kind == TAKEN else f"{key} isn't read by {verb}"
        fates.append(_fate(name, entry, kind, words, name not in given_names))
    others = sorted((name for name in entries if name not in plain), key=lambda name: order[_alias(entries[name]).name])
    for name in others:
        fates.append(_converted(name, entries[name], tree, verb, names.keys, name not in given_names))
    fates += [_doubled(name, entry, other, settings) for name, (entry, other) in doubled.items()]
    if settings.value("algo.name") != "ppo":
        # Here any algorithm may have one; there, its settings stand in every file.
        tree.pop("critic", None)
        at = [number for number, fate in enumerate(fates) if fate.kind == TAKEN and fate.words.startswith("critic.")]
        for number in at:
            fates[number] = replace(fates[number], kind=NEEDLESS_HERE, words="of these only ppo has a critic there")
    return Translation(_kept(tree, verb), fates)


def _alias(entry: WrittenKey) -> Alias:
    assert entry.alias is not None
    return entry.alias


def _fate(name: str, entry: WrittenKey, kind: str, words: str, is_default: bool) -> Fate:
    return Fate(name, inline(entry.given.plain), kind, words, is_default)


def _without_key(name: str, given: Given, names: KnownNames) -> Fate | None:
    """Return the fate of a name that sets no key here; None for the others."""
    inner, written = names.without_sections(name), inline(given.plain)
    if reason := names.reason_to_drop(inner, given) or names.reason_to_drop(name, given):
        return Fate(name, written, NEEDLESS_HERE, reason)
    parts = inner.split(".")
    starts = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    if starts & names.spellings.keys() or (names.is_known(inner) and not names.is_section(parts)):
        return None
    if name.endswith(".enabled") and given.value is False:
        return Fate(name, written, NEEDLESS_HERE, "it is off")
    return Fate(name, written, MISSING_HERE, names.known_advice(inner) or "no such setting here")


def _entry(name: str, given: Given, names: KnownNames) -> dict[str, WrittenKey]:
    source = [(tuple(name.split(".")), Given(given.value, given.text, name))]
    found = next(iter(canonical(source, names, [], {})), None)
    return {} if found is None else {name: found}


def _left_defaults(
    trainer: str, verb: str, entries: Mapping[str, WrittenKey], names: KnownNames
) -> dict[str, WrittenKey]:
    """Return a trainer's defaults of keys that its configuration doesn't give."""
    found = {".".join(entry.parts) for entry in entries.values()}
    defaults: dict[str, WrittenKey] = {}
    for name, value in DEFAULTS.get(trainer, {}).get(verb, {}).items():
        given = given_of(value, f"{name}, {trainer}'s default")
        entry = _entry(name, given, names)
        if entry and ".".join(entry[name].parts) not in found:
            defaults[name] = replace(entry[name], given=given)
    return defaults


def _converted(
    name: str, entry: WrittenKey, tree: dict[str, Given], verb: str, keys: Sequence[str], is_default: bool
) -> Fate:
    """Convert one value, whose results go into the tree."""
    problems: list[str] = []
    used = convert_aliases(tree, [entry], problems, verb, keys)
    if problems:
        words = problems[0].partition(f" {entry.spelling} ")[2]
        return _fate(name, entry, MISSING_HERE, words, is_default)
    if not used:
        return _fate(name, entry, NEEDLESS_HERE, f"{entry.key} isn't read by {verb}", is_default)
    words, alias = used[entry.spelling], _alias(entry)
    return _fate(name, entry, CONVERTED, f"{words} ({alias.here})" if alias.says_more else words, is_default)


def _doubled(name: str, entry: WrittenKey, other: str, settings: Settings) -> Fate:
    """Return the fate of a name whose key another name has set: none is left if both say the same."""
    try:
        wanted = entry.convert(entry.given, settings) if entry.convert else {entry.key: entry.given.plain}
    except ValueError as refusal:
        return _fate(name, entry, MISSING_HERE, str(refusal), False)
    same = all(settings.value(settings.home(key)) == value for key, value in wanted.items())
    words = f"{other} sets the same" if same else f"{other} sets that key otherwise"
    return _fate(name, entry, NEEDLESS_HERE if same else MISSING_HERE, words, False)


def _kept(tree: dict[str, Given], verb: str) -> dict[str, Given]:
    """Return the given keys that the verb reads."""
    kept: dict[str, Given] = {}
    for parts, given in _given_leaves(tree):
        if parts != ("num_ranks",) and is_read(verb, ".".join(parts)):
            plant(kept, parts, given)
    return kept


def _given_leaves(tree: dict[str, Given]) -> Iterator[tuple[tuple[str, ...], Given]]:
    for parts, given in leaves(Given(tree, "", "")):
        if given.origin != DEFAULT and find(tree, parts) is given:
            yield parts, given
