"""Calls per second of the sandbox that runs a policy's programs, beside a fresh interpreter without a sandbox.

Cases, in turn: `one box per row` is a row with one test; `20 tests per row` counts tests; `asserts` is a row with three
of them, in a process beside the program; `plain python` starts `python -I -S` and contains nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable

from spmdrl.engines.reward.rules.code_reward import CodeReward
from spmdrl.nouns.settings.reward_config import CodeConfig
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn, seconds_of

_SCRIPT = "print(2 * int(input()))"
_FUNCTION = "def double(x):\n    return 2 * x"
_TESTS_PER_ROW = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=int, default=100, help="calls of each case per round (100)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts (3)")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Measure all cases in turn, in this process."""
    if arguments.calls < _TESTS_PER_ROW or arguments.rounds < 1:
        raise ValueError(
            f"--calls is {arguments.calls} and --rounds {arguments.rounds}; at least {_TESTS_PER_ROW} and 1 are needed"
        )
    calls = arguments.calls
    reward = CodeReward(CodeConfig())
    try:
        cases: dict[str, tuple[int, Callable[[], object]]] = {
            "one box per row": (calls, lambda: _rows(reward, calls, _SCRIPT, _texts(1))),
            "20 tests per row": (
                calls,
                lambda: _rows(reward, calls // _TESTS_PER_ROW, _SCRIPT, _texts(_TESTS_PER_ROW)),
            ),
            "asserts": (calls, lambda: _rows(reward, calls, _FUNCTION, ["assert double(2) == 4"] * 3)),
            "plain python": (calls, lambda: [_plain() for _ in range(calls)]),
        }
        turns = in_turn({name: lambda act=act: seconds_of(act) for name, (_, act) in cases.items()}, arguments.rounds)
    finally:
        reward.close()
    rows = []
    for name, (count, _) in cases.items():
        seconds = statistics.median(turns[name].results)
        rows.append({"case": name, "calls": count, "calls/s": count / seconds, "ms per call": 1000 * seconds / count})
    return BenchTable("programs of the policy", rows)


def _texts(number: int) -> dict[str, list[str]]:
    return {"inputs": ["2\n"] * number, "outputs": ["4\n"] * number}


def _rows(reward: CodeReward, number: int, program: str, tests: object) -> None:
    judged = reward(["p"] * number, [program] * number, tests=[tests] * number)
    assert all(getattr(one, "value", None) == 1.0 for one in judged), judged[:3]


def _plain() -> None:
    command = [sys.executable, "-I", "-S", "-c", _SCRIPT]
    done = subprocess.run(command, input=b"2\n", capture_output=True, check=True)
    assert done.stdout == b"4\n", done
