from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import spmdrl
from spmdrl.resources.world import World
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def describe(world: World, word: str) -> tuple[str, int, int, int, str]:
    return word, world.rank, world.node, world.local_rank, os.environ["OMP_NUM_THREADS"]


def whereabouts(world: World) -> tuple[str, bool]:
    return spmdrl.__file__, "tests.support.preloaded" in sys.modules


def fail_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise KeyError("the cause")
    time.sleep(60)


def die_on_rank_1(world: World) -> None:
    if world.rank == 1:
        os._exit(3)
    time.sleep(60)


def test_results_come_back_in_rank_order_from_pretended_nodes():
    answers = run_ranks(4, describe, "word", ranks_per_node=2)
    assert answers == [("word", rank, rank // 2, rank % 2, "1") for rank in range(4)]


def test_ranks_are_forked_with_the_copy_that_is_tested_imported_before():
    assert run_ranks(1, whereabouts) == [(spmdrl.__file__, True)]


def test_the_first_failure_ends_all_ranks_with_its_traceback():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(.|\n)*KeyError: 'the cause'"):
        run_ranks(2, fail_on_rank_1)
    with pytest.raises(RuntimeError, match="rank 1 died without an exception"):
        run_ranks(2, die_on_rank_1)
    assert time.monotonic() - started < 50


def test_ranks_that_take_too_long_are_killed():
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2"):
        run_ranks(2, sleep_a_minute, timeout=2)


def sleep_a_minute(world: World) -> None:
    time.sleep(60)


FORKING = """
import time
from tests.support.ranks import fork
print(fork(time.sleep, 60).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_end_with_a_process_that_is_killed():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE, text=True, env=environment) as one:
        assert one.stdout is not None
        rank = Path(f"/proc/{one.stdout.readline().strip()}")
        assert rank.exists()
        one.kill()
        deadline = time.monotonic() + 20
        while rank.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not rank.exists()
