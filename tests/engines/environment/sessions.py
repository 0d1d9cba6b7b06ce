"""Environments with sessions for tests, loaded by their file's path; `columns["log"]` is a file of what happened."""

import os
import subprocess
import time

from spmdrl.engines.environment.episode import End, Observation, Row, Turn


def _orphan():
    return subprocess.Popen(["sleep", "60"], start_new_session=True).pid


POISONS = {
    "raise": lambda: {}["nothing"], "hang": lambda: time.sleep(60), "die": lambda: os._exit(3),
    "huge": lambda: Observation("x" * (1 << 24)), "bytes": lambda: Observation(b"x"), "end": lambda: End(reward=2.0),
}  # fmt: skip


class Counter:
    def __init__(self, row: Row):
        self.row, self.count, self.child = row, 0, None
        self.log("open")
        if row.columns.get("open") in POISONS:
            POISONS[row.columns["open"]]()
        if row.columns.get("open") == "child":
            self.child = _orphan()

    def log(self, what: str) -> None:
        with open(self.row.columns["log"], "a") as file:
            file.write(f"{what} {self.row.seed} {os.getpid()}\n")

    def step(self, turn: Turn):
        if turn.response.startswith("echo:"):
            return Observation(turn.response.removeprefix("echo:"))
        self.log(f"step:{turn.response}")
        self.count += 1
        if turn.response in POISONS:
            return POISONS[turn.response]()
        return Observation(f"{self.count} of {self.row.prompt} {self.child or ''}")

    def close(self):
        self.log("close")
        if self.row.columns.get("close") in POISONS:
            POISONS[self.row.columns["close"]]()


class Counting:
    def open(self, row: Row):
        return "no session" if row.columns.get("open") == "text" else Counter(row)


class RestoredCounter(Counter):
    def restore(self, turns: tuple[Turn, ...]):
        self.count = len(turns)
        self.log("restore:" + "+".join(f"{turn.response}>{turn.observation.strip()}" for turn in turns))


class Restored:
    def open(self, row: Row):
        return RestoredCounter(row)


class Both(Counting):
    def step(self, episode):
        return End()
