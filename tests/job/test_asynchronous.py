"""Checkpoints that threads write are those that training would have waited for."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job, summary_of, untimed

from spmdrl.engines.training.checkpoints import file_writes
from spmdrl.engines.training.checkpoints.manifest import damage
from spmdrl.runtime.supervision.hang_report import HUNG

# Times, settings, and names of the run.
NOT_ALIKE = ("run.json", "config.resolved.yaml", "manifest.json", "README.md", "adapter_config.json")


def files_of(run: Path) -> dict[str, bytes]:
    """What all checkpoints hold but for times and settings."""
    root = run / "checkpoints"
    paths = [path for path in root.rglob("*") if path.is_file() and path.name not in NOT_ALIKE]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


SETTINGS = ["checkpoint.interval=1", "checkpoint.keep_last=9", "checkpoint.best=reward"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps whose training waits for each checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    settings = [f"run.dir={folder / 'run'}", "checkpoint.asynchronous=false", *SETTINGS]
    job = finished(run_job("train", inline_config(folder), *settings, ranks=2))
    assert job.stdout.count("checkpoint of step") == 3
    return folder / "run"


@pytest.mark.ranks
def test_every_file_is_the_same_and_so_is_the_run(whole, tmp_path):
    written = tmp_path / "run"
    settings = [f"run.dir={written}", "checkpoint.asynchronous=true", *SETTINGS]
    job = finished(run_job("train", inline_config(tmp_path), *settings, ranks=2))
    assert job.stdout.count("checkpoint of step") == 3
    assert files_of(written) == files_of(whole) != {}
    assert untimed(metrics_of(written)) == untimed(metrics_of(whole))
    assert (written / "checkpoints/best").readlink() == (whole / "checkpoints/best").readlink()
    for run in (written, whole):
        saves = [json.loads(line) for line in (run / "checkpoints.jsonl").read_text().splitlines()]
        assert [save["step"] for save in saves] == [1, 2, 3]
        assert all(save["write_seconds"] >= save["seconds"] > 0 and save["bytes"] for save in saves)
        assert not list((run / "checkpoints").glob(".*"))


PAIRS = "data.train=synthetic://addition?low=0&high=9&count=40&max_error=5"
OTHER_JOBS = {
    "sft": ["sft", "sft.max_steps=4"],
    "preferences": ["preferences", PAIRS, "preferences={max_steps: 4, rows_per_step: 7}"],
    "a critic, experts and adapters": [
        "train", "algo.name=ppo", "critic={}", "model.make.model_type=deepseek_v3", "checkpoint.dtype=bfloat16",
        "lora={rank: 2}", "train.max_steps=2",
    ],
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_JOBS)
def test_other_jobs_and_what_else_they_train_are_saved_alike(name, tmp_path):
    (verb, *settings), config = OTHER_JOBS[name], inline_config(tmp_path)
    for is_on in ("true", "false"):
        options = [f"run.dir={tmp_path / is_on}", f"checkpoint.asynchronous={is_on}", "checkpoint.interval=1"]
        finished(run_job(verb, config, *settings, *options, "checkpoint.keep_last=9", ranks=2))
    found = files_of(tmp_path / "true")
    assert found == files_of(tmp_path / "false")
    assert len({name.partition("/")[0] for name in found}) == (2 if verb == "train" else 4)


@pytest.mark.ranks
def test_a_disk_that_refuses_one_costs_that_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDRL_FAULT", "checkpoint.fsync:1:2:enospc")
    settings = ["checkpoint.interval=1", "checkpoint.asynchronous=true", f"run.dir={tmp_path / 'run'}"]
    job = finished(run_job("train", inline_config(tmp_path), *settings, ranks=2))
    assert job.stdout.count("WARNING: checkpoint of step 2 FAILED, the run goes on without it") == 1
    root = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["step_000001", "step_000003"]
    assert summary_of(tmp_path / "run")["verdict"] == "done" and damage(root / "step_000003") is None


def without_memory_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        file_writes._MOST_OF_FREE = 0.0


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["resources.ranks.generation=1", "rollout.lag=2"]], ids=["together", "apart"])
def test_a_rank_without_memory_for_copies_has_all_wait(tmp_path, more):
    settings = ["checkpoint.interval=1", "checkpoint.asynchronous=true", f"run.dir={tmp_path / 'run'}", *more]
    job = finished(run_job("train", inline_config(tmp_path), *settings, ranks=3, prepare=without_memory_on_rank_1))
    assert job.stdout.count("training waits for checkpoints from here on") == 1 and "FAILED" not in job.stdout
    assert job.stdout.count("checkpoint of step") == 3 and damage(tmp_path / "run/checkpoints/step_000003") is None


def test_a_run_that_fails_leaves_the_checkpoint_that_was_being_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDRL_FAULT", "generate:0:3:raise")
    settings = ["checkpoint.interval=2", "checkpoint.asynchronous=true", f"run.dir={tmp_path / 'run'}"]
    job = run_job("train", inline_config(tmp_path), *settings)
    assert job.returncode and "raised on purpose" in job.stderr
    root = tmp_path / "run/checkpoints"
    assert [path.name for path in root.iterdir()] == ["step_000002"] and damage(root / "step_000002") is None
    monkeypatch.delenv("SPMDRL_FAULT")
    assert "after step 2" in finished(run_job("train", inline_config(tmp_path), *settings)).stdout


@pytest.mark.ranks
@pytest.mark.parametrize(
    "fault",
    [
        "fsync:1:2",
        *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("write:0:2", "rename:0:2", "rename:0:2:1")),
    ],
)
def test_a_rank_killed_while_threads_write_costs_no_bit(fault, whole, tmp_path, monkeypatch):
    stage, rank, step, *passes = fault.split(":")
    monkeypatch.setenv("SPMDRL_FAULT", ":".join([f"checkpoint.{stage}", rank, step, "sigkill", *passes]))
    settings = ["checkpoint.interval=1", "checkpoint.asynchronous=true", f"run.dir={tmp_path / 'run'}"]
    killed = run_job("train", inline_config(tmp_path), *settings, ranks=2)
    assert killed.returncode == -signal.SIGKILL
    root = tmp_path / "run/checkpoints"
    assert all(damage(path) is None for path in root.glob("step_*"))
    monkeypatch.delenv("SPMDRL_FAULT")
    finished(run_job("train", inline_config(tmp_path), *settings, ranks=2))
    assert untimed(metrics_of(tmp_path / "run")) == untimed(metrics_of(whole))
    last = "step_000003/"
    found, expected = files_of(tmp_path / "run"), files_of(whole)
    assert {name for name in found if name.startswith(last)} == {name for name in expected if name.startswith(last)}
    assert all(found[name] == expected[name] for name in found if name.startswith(last))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_thread_that_hangs_is_found_where_its_rank_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDRL_FAULT", "checkpoint.fsync:1:2:hang")
    settings = ["checkpoint.interval=1", "checkpoint.asynchronous=true", f"run.dir={tmp_path / 'run'}"]
    limit = ["resources.stage_timeout_seconds=3", "train.max_steps=1000"]
    job = run_job("train", inline_config(tmp_path), *settings, *limit, ranks=2)
    assert job.returncode == HUNG and re.search(
        r"rank 1 hangs: no progress for \d+ s; rank 1 in checkpoint", job.stderr
    )
    assert "step_000001" in {path.name for path in (tmp_path / "run/checkpoints").glob("step_*")}
