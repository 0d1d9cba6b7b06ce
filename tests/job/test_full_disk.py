"""A disk that fills up at any write: what was kept stays, logs catch up, and nothing half-written is read."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.jobs import finished, metrics_of, run_job, summary_of, tiny_config

from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.engines.training.checkpoints.manifest import damage
from spmdrl.engines.training.checkpoints.trainer_state import write_shards
from spmdrl.engines.training.sharded_model import Shard
from spmdrl.job.evaluator import write_records
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.observability.jsonl import JsonlWriter, read_jsonl
from spmdrl.observability.outage import best_effort
from spmdrl.observability.summary import keep_room, read_summary, write_summary

FUZZ = int(os.environ.get("SPMDRL_FUZZ", "300"))
PAGE = os.sysconf("SC_PAGE_SIZE")
REQUIRED = ("run.json", "trainer/shards_00000.safetensors")


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of its own in memory; the test is skipped where none may be mounted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, num_free: int) -> Path:
    """Leave `num_free` bytes of the disk, in whole pages, whoever else writes to it meanwhile."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        while True:
            size = os.fstat(file.fileno()).st_size
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            if size and free <= num_free:
                return ballast
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, size + max(free - num_free, 1))


def tensors(step: int) -> dict[str, Shard]:
    return {
        f"weight/{name}": Shard(torch.full((3000,), float(step)), whole_slice(name, (3000,)), (3000,)) for name in "ab"
    }


def write_checkpoint(folder: Path, step: int) -> list[Path]:
    (folder / "trainer").mkdir()
    shards = write_shards(folder / "trainer", 0, tensors(step))
    (folder / "run.json").write_text(json.dumps({"step": step}))
    return [shards, folder / "run.json"]


def test_whichever_page_of_a_checkpoint_the_disk_lacks_the_one_before_stays(tmp_path):
    with small_disk(tmp_path / "disk", 96 * PAGE) as disk:
        store = CheckpointStore(disk / "checkpoints", CheckpointConfig(), is_main=True, required=REQUIRED)
        assert store.save(1, lambda folder: write_checkpoint(folder, 1)).folder
        failures = set()
        for num_pages in range(12):
            ballast = fill(disk, num_pages * PAGE)
            result = store.save(2, lambda folder: write_checkpoint(folder, 2))
            ballast.unlink()
            assert damage(store.folder_of(1), REQUIRED) is None
            if result.folder is None:
                failures.add(str(result.error).partition(":")[0])
                assert store.steps() == [1] and not list(store.root.glob(".*")), f"{num_pages} pages free"
            else:
                assert store.steps() == [1, 2] and damage(result.folder, REQUIRED) is None
                break
        assert {"OSError", "SafetensorError"} <= failures and result.folder is not None


def test_whichever_line_of_a_log_the_disk_refuses_it_catches_up(tmp_path, capfd):
    with small_disk(tmp_path / "disk", 64 * PAGE) as disk:
        for num_pages in range(4):
            path = disk / f"log_{num_pages}.jsonl"
            log, ballast = JsonlWriter(path), fill(disk, num_pages * PAGE)
            lines = [{"step": step, "text": "x" * 150} for step in range(100)]
            for line in lines[:80]:
                log.write(line)
                assert list(read_jsonl(path)) == lines[: len(list(read_jsonl(path)))]
            assert log.num_waiting > 0 and path.read_bytes().count(b"\n") == 80 - log.num_waiting
            ballast.unlink()
            for line in lines[80:]:
                log.write(line)
            log.close()
            assert log.num_lost == 0 and path.read_text().splitlines() == [json.dumps(line) for line in lines]
            said = capfd.readouterr().err
            assert said.count("can't be written") == 1 and said.count("is written again") == 1
            path.unlink()


def test_lines_that_never_find_room_are_counted_and_said(tmp_path, capfd):
    with small_disk(tmp_path / "disk", 16 * PAGE) as disk:
        log = JsonlWriter(disk / "log.jsonl")
        fill(disk, 0)
        for step in range(3):
            log.write({"step": step})
        log.close()
    assert log.num_lost == 3
    assert "closed without its last 3 lines" in capfd.readouterr().err


def test_files_that_are_replaced_whole_stay_as_they_were(tmp_path, capfd):
    with small_disk(tmp_path / "disk", 32 * PAGE) as disk:
        write_summary(disk, verdict="running")
        write_records(disk / "eval.jsonl", [{"row": 1}])
        fill(disk, 0)
        with best_effort("summary.json"):
            write_summary(disk, verdict="done", text="x" * 3 * PAGE)
        with best_effort("eval.jsonl"):
            write_records(disk / "eval.jsonl", [{"row": row} for row in range(3 * PAGE)])
        assert read_summary(disk)["verdict"] == "running"
        assert list(read_jsonl(disk / "eval.jsonl")) == [{"row": 1}]
        assert not list(disk.glob(".*"))
    assert capfd.readouterr().err.count("could not be written, the run goes on") == 2


def test_the_end_of_a_run_is_written_on_a_full_disk_into_the_room_that_was_kept(tmp_path):
    with small_disk(tmp_path / "disk", 64 * PAGE) as disk:
        write_summary(disk, verdict="running", host="a")
        keep_room(disk)
        fill(disk, 0)
        write_summary(disk, verdict="unsaved", error="x" * 3 * PAGE)
        assert read_summary(disk)["verdict"] == "unsaved" and read_summary(disk)["host"] == "a"
        assert not list(disk.glob(".*"))


@pytest.mark.slow
def test_a_run_on_a_disk_that_fills_up_goes_on_and_what_it_leaves_is_sound(tmp_path):
    """The disk fills once the first step is logged, at a different page each time, and is freed some steps later."""
    config = tiny_config(tmp_path)
    settings = ["checkpoint.interval=1", "train.max_steps=16", "log.samples_per_step=4"]
    for num_pages in [0, 60] if FUZZ <= 300 else range(0, 80, 2):
        with small_disk(tmp_path / f"disk_{num_pages}", 4 << 20) as disk:
            run, said = disk / "run", []
            watch = threading.Thread(target=fill_for_some_steps, args=(run, disk, num_pages * PAGE, said))
            watch.start()
            job = run_job("train", config, f"run.dir={run}", *settings)
            watch.join()
            assert said == ["filled", "freed"] and job.returncode == 0, job.stderr
            assert "Traceback" not in job.stderr and ("can't be written" in job.stderr or "FAILED" in job.stdout)
            assert [step["step"] for step in metrics_of(run)] == list(range(1, 17))
            assert summary_of(run)["verdict"] == "done"
            checkpoints = list((run / "checkpoints").iterdir())
            assert [path.name for path in sorted(checkpoints)] == ["step_000015", "step_000016"]
            assert all(damage(path, ("run.json", "model/config.json")) is None for path in checkpoints)


def fill_for_some_steps(run: Path, disk: Path, num_free: int, said: list[str]) -> None:
    wait_for_step(run, 1)
    # The step is logged before its checkpoint is begun.
    wait_until((run / "checkpoints").is_dir)
    ballast = fill(disk, num_free)
    said.append("filled")
    # No log shows its progress meanwhile, but each save, though it fails, changes the folder that it writes into.
    changes, deadline = set(), time.monotonic() + 20
    while len(changes) < 6 and time.monotonic() < deadline:
        changes.add((run / "checkpoints").stat().st_mtime_ns)
        threading.Event().wait(0.005)
    ballast.unlink()
    said.append("freed")


def wait_for_step(run: Path, step: int) -> None:
    wait_until(lambda: any(line.get("step") == step for line in read_jsonl(run / "metrics.jsonl")))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_refused_before_the_model_is_loaded(tmp_path):
    with small_disk(tmp_path / "disk", 300 * 1024) as disk:
        job = run_job("train", tiny_config(tmp_path), f"run.dir={disk / 'run'}", "train.max_steps=30",
                         "checkpoint.interval=1")  # fmt: skip
        assert job.returncode == 2 and "Traceback" not in job.stderr
        assert "bytes of random weights (model.make) and 3 checkpoints of " in job.stderr
        assert "lower checkpoint.keep_last" in job.stderr
        assert not list(disk.rglob("metrics.jsonl"))
    finished(run_job("train", tiny_config(tmp_path), f"run.dir={tmp_path / 'run'}", "train.max_steps=1"))
