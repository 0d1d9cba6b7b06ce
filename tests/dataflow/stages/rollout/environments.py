"""Environments for tests, loaded by their file's path."""

import os
import time
from pathlib import Path

from spmdrl.engines.environment.episode import End, Episode, Observation, Reply, Row, Turn


class Answering:
    """Answers with the turn's length, in letters that depend on the row's seed, and ends the row after three turns."""

    def step(self, episode: Episode):
        if len(episode.turns) == 2:
            return End()
        letter = "abcdefgh"[(episode.seed + len(episode.turns)) % 8]
        return Observation(letter * (len(episode.response) % 3), reward=len(episode.response) / 4)


class Remembering:
    """Answers as `Answering` does, by what it keeps of its row."""

    def open(self, row: Row):
        return Memory(row.seed)


class Memory:
    open_ones = 0

    def __init__(self, seed: int, dies_at: int | None = None):
        self.seed, self.num_turns, self.dies_at = seed, 0, dies_at
        Memory.open_ones += 1

    def step(self, turn: Turn):
        self.num_turns += 1
        if self.num_turns == self.dies_at:
            os._exit(3)
        if self.num_turns == 3:
            return End()
        letter = "abcdefgh"[(self.seed + self.num_turns - 1) % 8]
        return Observation(letter * (len(turn.response) % 3), reward=len(turn.response) / 4)

    def close(self):
        Memory.open_ones -= 1


class Dying:
    """Answers as `Remembering` does, but in one row a turn of it kills the process."""

    def open(self, row: Row):
        return Memory(row.seed, dies_at=row.columns["dies_at"] if row.seed == row.columns["seed"] else None)


class Killed(BaseException):
    """The end of the process."""


class Numbering:
    """Answers with the number of the call, which a file holds; some call ends the process."""

    def step(self, episode: Episode):
        path = Path(episode.columns["counter"])
        number = int(path.read_text())
        if number == int(path.with_suffix(".dies").read_text()):
            raise Killed
        path.write_text(str(number + 1))
        if len(episode.turns) == 3:
            return End(reward=float(number))
        return Observation("abcdefgh"[number % 8] * (number % 3))


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


class Replying:
    """Answers with the messages that the data gives for each turn, then ends the row."""

    def open(self, row: Row):
        return Replies(row.columns["replies"])


class Replies:
    def __init__(self, replies: list):
        self.replies = iter(replies)

    def step(self, turn: Turn):
        messages = next(self.replies, None)
        return End(reward=1.0) if messages is None else Reply(messages)


class Opened:
    """As `Replying`, behind a text that ends the prompt."""

    has_openings = True

    def open(self, row: Row):
        replies = Replies(row.columns["replies"])
        replies.opening = row.columns["opening"]
        return replies


class Adder:
    """Adds numbers by the model's calls of its one function, and keeps a list of what it was asked."""

    tools = [
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
    ]  # fmt: skip

    def open(self, row: Row):
        return Sums()


class Sums:
    last: "Turn | None" = None
    stepped = 0

    def step(self, turn: Turn):
        Sums.last, Sums.stepped = turn, Sums.stepped + 1
        if turn.problems:
            return Reply([{"role": "user", "content": problem} for problem in turn.problems])
        results = [
            {"role": "tool", "name": call.name, "content": str(sum(call.arguments.values()))} for call in turn.calls
        ]
        return Reply(results) if results else End(reward=float(turn.content))
