"""Names that a configuration doesn't have, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spmdrl.config.renames import Alias
from spmdrl.config.values import within
from spmdrl.config.yaml_nodes import Given, leaves
from spmdrl.observability.terminal.spelling import edit_distance, nearest


@dataclass(frozen=True)
class KnownNames:
    """The keys of a configuration, their other spellings, and advice for names that users look for."""

    keys: Sequence[str]
    spellings: Mapping[str, Alias]
    wished: Mapping[str, str]

    def advice(self, key: str) -> str:
        """What to do about an unknown key."""
        wish = self.wish(key)
        if wish is not None:
            return wish
        near = self.near(key)
        if near:
            return f"did you mean {' or '.join(near)}?"
        section = key.rpartition(".")[0]
        section = section if section in self.keys else ""
        beside = [name.rpartition(".")[2] for name in self.keys if name.rpartition(".")[0] == section]
        return f"the keys of {section or 'the top level'} are {', '.join(beside)}"

    def wish(self, key: str) -> str | None:
        """The advice for a name that isn't here, unless the same name is a key elsewhere."""
        *sections, last = key.split(".")
        if key in self.wished:
            return self.wished[key]
        if self._named(last) or self._ends_of(key):
            return None
        return next((self.wished[name] for name in (last, *sections) if name in self.wished), None)

    def near(self, key: str) -> list[str]:
        """The keys that a misspelt one may mean: the same name in another section first, then similar ones."""
        ends, (section, _, last) = self._ends_of(key), key.rpartition(".")
        if ends:
            return ends
        same = self._named(last)
        if same:
            return sorted(same, key=lambda name: edit_distance(name, key))[:3]
        beside = [name for name in self.keys if within(name, section) and name != section]
        for known in (beside, [*self.keys, *self.spellings]):
            by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
            match = nearest(last, by_last)
            if match is not None:
                return [self._key_of(by_last[match])]
        # A wrong section may hide a right key; in a right section, its name would make every key look similar.
        match = None if section in self.keys else nearest(key, [*self.keys, *self.spellings])
        return [] if match is None else [self._key_of(match)]

    def meant(self, unknown: str) -> list[str]:
        """The keys that an unknown one may stand for: the nearest, or any of its section."""
        section = unknown.rpartition(".")[0]
        beside = [name for name in self.keys if section and name.rpartition(".")[0] == section]
        return [*self.near(unknown), *beside]

    def leaves_to_show(self, key: str, given: Given) -> Iterator[tuple[str, Given]]:
        """An unknown section as one entry where one piece of advice is about all of it, else what stands in it."""
        inside = list(leaves(given)) if isinstance(given.value, dict) else []
        meant = self.near(key)
        if self.wish(key) or not inside or any(f"{meant[0]}.{parts[0]}" in self.keys for parts, _ in inside if meant):
            yield key, given
            return
        for parts, leaf in inside:
            yield ".".join((key, *parts)), leaf

    def _named(self, last: str) -> list[str]:
        return [name for name in self.keys if name.rpartition(".")[2] == last]

    def _ends_of(self, key: str) -> list[str]:
        """The known name that `key` ends with below sections of another trainer, as in actor_rollout_ref.rollout.n."""
        names = key.split(".")
        ends = [".".join(names[start:]) for start in range(1, len(names))]
        return [self._key_of(end) for end in ends if end in self.keys or end in self.spellings][:1]

    def _key_of(self, name: str) -> str:
        return self.spellings[name].key if name in self.spellings else name
