"""The soak finds what grows with the steps of a job, whether in its processes or in its files."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from tests.bench.__main__ import main
from tests.bench.memory.job_holdings import Holding, amounts_in, amounts_of
from tests.bench.training.soak import growth_rows
from tests.support.ranks import end, fork

RANK, THREADS, METRICS = "resident memory of rank 0, MiB", "threads of rank 0", "metrics, bytes"


def flat_ones(amounts_at) -> dict[str, object]:
    rows = growth_rows([Holding(step, amounts_at(step)) for step in range(500, 5001, 50)])
    return {str(row["amount"]): row["flat"] for row in rows}


def test_what_grows_a_little_with_each_step_is_not_flat():
    leaking = flat_ones(lambda step: {RANK: 400 + step / 400, THREADS: 20 + step // 1000})
    assert leaking == {RANK: "NO", THREADS: "NO"}


def test_what_goes_up_and_down_or_is_kept_per_step_is_no_leak():
    steady = flat_ones(lambda step: {RANK: 400 + (step // 50) % 3, THREADS: 20 + (step == 900), METRICS: 3000 * step})
    assert steady == {RANK: "yes", THREADS: "yes", METRICS: "3000 bytes a step"}


def hold_more() -> None:
    """Count what this process holds before and after it holds more; a fresh one has no threads that end meanwhile."""
    before = amounts_of({0: os.getpid()})
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    child = multiprocessing.get_context("fork").Process(target=ended.wait, daemon=True)
    reader, writer = os.pipe()
    child.start()
    thread.start()
    try:
        after = amounts_of({0: os.getpid()})
    finally:
        ended.set()
        child.kill()
        child.join()
        thread.join()
        for descriptor in (reader, writer):
            os.close(descriptor)
    more = {name: after[name] - before[name] for name in before}
    assert more["descriptors of rank 0"] >= 2
    assert more["threads of rank 0"] == more["child processes of rank 0"] == 1
    assert more["resident memory of rank 0's children, MiB"] > 1


def test_what_a_process_holds_is_counted():
    process = fork(hold_more)
    process.join(60)
    code = process.exitcode
    end(process, 0.0)
    assert code == 0


def test_files_of_a_run_are_counted_by_kind(tmp_path):
    for name, size in {
        "metrics.jsonl": 7,
        "rows/rank_00000.jsonl": 5,
        "rows/rank_00001.jsonl": 6,
        "run.token": 3,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    found = amounts_in(tmp_path)
    assert found["files but for evaluations and timeline"] == 4
    assert [found[f"{kind}, bytes"] for kind in ("metrics", "rows", "other files", "report")] == [7, 11, 3, 0]


@pytest.mark.parametrize("words", ["--steps 550", "--ranks 1"])
def test_a_soak_without_two_looks_or_two_ranks_is_refused(words, capsys):
    assert main(["soak", *words.split()]) == 2
    assert "--steps" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.slow
def test_a_short_soak_looks_at_both_ranks(tmp_path, capsys):
    # What a job holds in its first steps isn't flat yet, which fails the bench.
    main(["soak", "--steps", "24", "--warm", "8", "--interval", "8"])
    screen = capsys.readouterr().out
    assert all(f"descriptors of rank {rank}" in screen for rank in (0, 1))
    assert "the report, written at the end: " in screen
