"""Environments for tests, loaded by their file's path."""

import os
import time

from spmdrl.engines.environment.episode import End, Episode, Observation


class Answering:
    """Answers with the turn's length, in letters that depend on the row's seed, and ends the row after three turns."""

    def step(self, episode: Episode):
        if len(episode.turns) == 2:
            return End()
        letter = "abcdefgh"[(episode.seed + len(episode.turns)) % 8]
        return Observation(letter * (len(episode.response) % 3))


class Judging:
    """Ends each row with a reward of its own, or fails, by its prompt."""

    def step(self, episode: Episode):
        what = episode.columns["what"]
        if what == "crash":
            raise KeyError("no such thing")
        if what == "die":
            os._exit(3)
        if what == "hang":
            time.sleep(60)
        if what == "malformed":
            return "text"
        return End(reward=len(episode.response) / 8)
