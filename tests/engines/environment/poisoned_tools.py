"""A tool that misbehaves in the way that the model's turn names."""

import ctypes
import os
import subprocess
import sys
import time

import numpy

from spmdrl.engines.environment.episode import End, Observation


class Text(str):
    def __len__(self):
        raise RuntimeError("no length")


class SlowToBuild:
    def __init__(self):
        time.sleep(60)

    def step(self, episode):
        return End()


def _interrupt():
    raise KeyboardInterrupt("stop")


class Poisoned:
    def step(self, episode):
        return POISONS[episode.response]()


def _orphan():
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    return Observation("left one")


def _hog():
    held = []
    while True:
        held.append(bytearray(1 << 24))


def _loop():
    while True:
        pass


POISONS = {
    "interrupt": _interrupt,
    "fine": lambda: Observation("fine"),
    "stuck": lambda: time.sleep(60),
    "loop": _loop,
    "raise": lambda: {}["nothing"],
    "exit": lambda: sys.exit(0),
    "die": lambda: os._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "hog": _hog,
    "huge": lambda: Observation("x" * (1 << 24)),
    "half a pair": lambda: Observation("a\ud800"),
    "bytes": lambda: Observation(b"bytes"),
    "text": lambda: "text",
    "nothing": lambda: None,
    "class": lambda: Observation,
    "no length": lambda: Observation(Text("x")),
    "NaN": lambda: End(reward=float("nan")),
    "infinite turn": lambda: Observation("x", reward=float("inf")),
    "text for a turn": lambda: Observation("x", reward="1"),
    "a turn by numpy": lambda: Observation("x", reward=numpy.float32(0.5)),
    "huge reward": lambda: End(reward=10**400),
    "text reward": lambda: End(reward="1"),
    "prints": lambda: print("x" * 100_000) or Observation("printed"),
    "orphan": _orphan,
    "input": lambda: Observation(input()),
}
