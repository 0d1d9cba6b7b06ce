"""A pass that runs out of memory on one rank is done again by all of them, with half the tokens at once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.bench.faults.planned_faults import VARIABLE
from tests.support.jobs import finished, inline_config, metrics_of, run_job

from spmdrl.engines.training.microbatch import MemoryRanOut, MicrobatchLimit
from spmdrl.job.model.update_troubles import LIMIT_FILE

SMALL = (
    "train.max_tokens_per_microbatch=128", "train.epochs_per_step=2", "train.max_steps=2", "checkpoint.interval=1",
)  # fmt: skip
ALIKE = ("loss", "grad_norm", "entropy", "reward", "update/skipped", "dock/trained")


def train(tmp_path: Path, name: str, *settings: str, ranks: int) -> subprocess.CompletedProcess[str]:
    return run_job("train", inline_config(tmp_path), f"run.dir={tmp_path / name}", *SMALL, *settings, ranks=ranks)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    finished(train(folder, "run", ranks=2))
    return folder / "run"


def check_same(whole: Path, disturbed: Path) -> None:
    """The disturbed run's figures are the other one's but for rounding."""
    for there, here in zip(metrics_of(whole), metrics_of(disturbed), strict=True):
        assert {name: here[name] for name in ALIKE} == pytest.approx({name: there[name] for name in ALIKE}, abs=2e-5)


@pytest.mark.ranks
def test_a_rank_that_runs_out_in_a_forward_pass_stays_in_step_and_all_do_it_again(whole, tmp_path, monkeypatch):
    for number, (stage, layout) in enumerate([("forward", "shard"), ("score", "shard"), ("forward", "data")]):
        monkeypatch.setenv(VARIABLE, f"{stage}:1:2:oom:1")
        job = finished(train(tmp_path, "out", f"resources.update={{{layout}: 2}}", "resume=never", ranks=2))
        assert "micro-batch" not in job.stderr and job.stdout.count("the pass is done again") == 1, number
        assert "train.max_tokens_per_microbatch 64 (halved 1 of at most 3 times)" in job.stdout
        check_same(whole, tmp_path / "out")
    assert json.loads((tmp_path / "out" / LIMIT_FILE).read_text()) == {"tokens": 128, "halvings": 1}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "layout"), [("backward", "shard"), ("forward", "tensor")])
def test_where_ranks_cannot_stay_in_step_the_next_attempt_begins_with_half(whole, tmp_path, monkeypatch, stage, layout):
    layout = f"resources.update={{{layout}: 2}}"
    monkeypatch.setenv(VARIABLE, f"{stage}:1:2:oom:1")
    job = train(tmp_path, "out", layout, ranks=2)
    assert job.returncode == 1 and "Traceback" not in job.stderr
    assert job.stderr.count("OutOfMemory: stage update needs more memory") == 1
    assert "the same command goes on with 64" in job.stderr and "it held optimizer" in job.stderr
    monkeypatch.delenv(VARIABLE)
    again = finished(train(tmp_path, "out", layout, ranks=2))
    assert "train.max_tokens_per_microbatch is 64: 128 were more" in again.stdout
    check_same(whole, tmp_path / "out")


def test_one_rank_alone_does_backward_again_too(tmp_path, monkeypatch):
    finished(train(tmp_path, "whole", ranks=1))
    monkeypatch.setenv(VARIABLE, "backward:0:2:oom:1")
    assert finished(train(tmp_path, "out", ranks=1)).stdout.count("the pass is done again") == 1
    check_same(tmp_path / "whole", tmp_path / "out")


def test_a_limit_is_halved_three_times():
    limit, seen = MicrobatchLimit(100), list[str]()
    limit.when_halved = seen.append
    for tokens in (50, 25, 12):
        limit.halve(MemoryRanOut("full"))
        assert limit.tokens == tokens
    with pytest.raises(MemoryRanOut, match="too full"):
        limit.halve(MemoryRanOut("too full"))
    assert seen == ["full"] * 3 and limit.tokens == 12
