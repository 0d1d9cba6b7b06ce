"""Ranks of a bench: results come in rank order, the first failure is quoted, and no rank outlives the bench."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World
from tests.bench.harness.bench_ranks import BenchRanks

pytestmark = pytest.mark.ranks


def _squared_rank(world: World, offset: int) -> tuple[int, int, str]:
    barrier()
    return world.rank, world.rank**2 + offset, os.environ["TMPDIR"]


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_results_are_in_rank_order_and_temporary_files_are_removed(start_method):
    results = BenchRanks(2, start_method=start_method).call(_squared_rank, 5)
    assert [result[:2] for result in results] == [(0, 5), (1, 6)]
    assert not Path(results[0][2]).exists()


def _fail_or_wait(world: World) -> None:
    if world.rank == 1:
        raise ZeroDivisionError("the culprit")
    barrier()


def test_the_rank_that_failed_first_is_quoted():
    with pytest.raises(RuntimeError, match="rank 1 failed: (.|\n)*ZeroDivisionError: the culprit"):
        BenchRanks(2, start_method="forkserver").call(_fail_or_wait)


def _kill_or_wait(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()


def test_a_rank_that_is_killed_ends_the_others():
    with pytest.raises(RuntimeError, match="rank 1 failed: the process died"):
        BenchRanks(2, start_method="forkserver").call(_kill_or_wait)


SLEEPERS = """
import os, sys, time
from pathlib import Path
from tests.bench.harness.bench_ranks import BenchRanks

def sleep(world, folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    BenchRanks(2).call(sleep, sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_when_their_parent_does(number: signal.Signals, tmp_path: Path):
    script, folder = tmp_path / "sleepers.py", tmp_path / "ranks"
    script.write_text(SLEEPERS)
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, script, folder], env=environment)
    _wait_until(lambda: len(list(folder.iterdir())) == 2)
    parent.send_signal(number)
    parent.wait(60)
    _wait_until(lambda: not any(Path(f"/proc/{rank.name}").exists() for rank in folder.iterdir()))


def _wait_until(is_true) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
