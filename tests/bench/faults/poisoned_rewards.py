"""Reward functions that raise, loop, crash, hog memory or return nonsense: each call ends with an explicit verdict."""

from __future__ import annotations

import os
import time
from pathlib import Path

from spmdrl.engines.reward.calls import RewardCall
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.nouns.settings.reward_config import RewardConfig
from spmdrl.runtime.workers.verdict import Verdict
from tests.bench.faults.fault_jobs import processes_below
from tests.bench.faults.fault_tally import Tally

_TIMEOUT_SECONDS = 1.0
_MEMORY_GIB = 0.2
_POISONS = """
import ctypes, os, sys, time

def hog():
    blocks = []
    while True:
        blocks.append(bytearray(1 << 24))

def loop():
    while True:
        pass

def recurse():
    return recurse()

def child():
    os.fork()
    while True:
        pass

POISONS = {
    "raise": lambda: 1 / 0, "exit": lambda: sys.exit(0), "os_exit": lambda: os._exit(0), "loop": loop,
    "sleep": lambda: time.sleep(60), "segfault": lambda: ctypes.string_at(0), "hog": hog, "recurse": recurse,
    "child": child, "too_few": lambda: [], "text": lambda: ["good"], "nan": lambda: [float("nan")],
}

def poisoned(completions, **columns):
    return POISONS[completions[0]]() if completions[0] in POISONS else [1.0]
"""
NAMES = (
    "raise", "exit", "os_exit", "loop", "sleep", "segfault", "hog", "recurse", "child", "too_few", "text", "nan",
)  # fmt: skip


def poisons(root: Path, *, count: int) -> list[Tally]:
    """So many calls of each; all must be back within the timeout and a second, and the next call be scored."""
    path = root / "poisons.py"
    path.write_text(_POISONS)
    config = RewardConfig(
        functions=(f"{path}:poisoned",), timeout_seconds=_TIMEOUT_SECONDS, memory_limit_gib=_MEMORY_GIB,
        isolation="process",
    )  # fmt: skip
    before, tallies = processes_below(os.getpid()), []
    with RewardPool(config) as pool:
        for name in NAMES:
            tally = Tally("R8", f"reward function: {name}")
            for number in range(count):
                _verdict(pool, "fine", -1 - number)
                started = time.perf_counter()
                verdict = _verdict(pool, name, number)
                seconds = time.perf_counter() - started
                is_kept = verdict is not Verdict.SCORED and seconds < _TIMEOUT_SECONDS + 1
                tally.count(seconds, None if is_kept else f"{name}: {verdict.name} after {seconds:.2f} s")
            tallies.append(tally)
    left = Tally("R8", "processes left by reward functions")
    with left.timed("after the pool closed") as problems:
        if more := processes_below(os.getpid()) - before:
            problems.append(f"processes {sorted(more)}")
    return [*tallies, left]


def _verdict(pool: RewardPool, text: str, number: int) -> Verdict:
    pool.submit({number: RewardCall(["prompt"], [text], [[1]], {})})
    (result,) = pool.collect([number])
    return result.verdicts[0]
