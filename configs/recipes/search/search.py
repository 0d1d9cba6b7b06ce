"""A search in a file of facts: after `[mira home]` the model reads the line that has the most of these words."""

import re
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path

from spmdrl.engines.environment.episode import End, Episode, Observation

MOST_SEARCHES = 3
NOTHING = "nothing."


class Search:
    """A turn that ends with `]` is a search for what is in its brackets; the next one without is the answer."""

    def step(self, episode: Episode) -> Observation | End:
        if not episode.response.endswith("]"):
            return End()
        if len(episode.turns) == MOST_SEARCHES:
            return End(reward=0.0)
        return Observation(read_corpus(episode.columns["corpus"]).best_line(episode.response.rpartition("[")[2]))


class Corpus:
    """The lines of a text, and where each word is."""

    def __init__(self, text: str):
        self.lines = text.splitlines()
        self.places: dict[str, list[int]] = defaultdict(list)
        for place, line in enumerate(self.lines):
            for word in words_of(line):
                self.places[word].append(place)

    def best_line(self, query: str) -> str:
        """Return the first of the lines with the most words of the query."""
        shared = Counter(place for word in words_of(query) for place in self.places.get(word, ()))
        return self.lines[min(shared, key=lambda place: (-shared[place], place))] if shared else NOTHING


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


@lru_cache
def read_corpus(path: str) -> Corpus:
    return Corpus(Path(path).read_text(encoding="utf-8"))
