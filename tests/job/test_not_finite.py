"""A value that isn't finite on one rank costs that update alone, on all ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.bench.faults.planned_faults import VARIABLE
from tests.engines.training.tiny import make_rows
from tests.support.jobs import finished, inline_config, metrics_of, run_job

from spmdrl.job.model.update_troubles import SkippedBatches
from spmdrl.observability.health import counts_so_far, too_many_skips

KEEPING = ("checkpoint.interval=1", "checkpoint.keep_last=3", "train.max_steps=3")


def trainer_of(run: Path, step: int) -> dict[str, object]:
    paths = sorted((run / "checkpoints" / f"step_{step:06d}" / "trainer").glob("*"))
    assert len(paths) == 2
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stage", "broken", "setting"),
    [
        ("advantage", ["response/advantages"], "seed=0"),
        ("logprob", ["response/old_logprobs"], "train.epochs_per_step=2"),
        ("forward", [], "seed=0"),
        ("optim", [], "seed=0"),
    ],
)
def test_nan_on_one_rank_is_skipped_on_all_and_its_rows_are_kept(tmp_path, monkeypatch, stage, broken, setting):
    run = tmp_path / "run"
    monkeypatch.setenv(VARIABLE, f"{stage}:1:2:nan")
    job = finished(run_job("train", inline_config(tmp_path), f"run.dir={run}", setting, *KEEPING, ranks=2))
    skipped = [step["update/skipped"] for step in metrics_of(run)]
    num_updates = metrics_of(run)[1]["update/count"]
    assert skipped[0] == skipped[2] == 0 and skipped[1] == (num_updates if broken else 1)
    if skipped[1] == num_updates:
        assert trainer_of(run, 2) == trainer_of(run, 1) != trainer_of(run, 3)
    folder = run / "skipped" / "step_000002_policy_1"
    assert f"step 2: the rows of the skipped update are in {folder}" in job.stdout
    records = [json.loads((folder / f"rank_0000{rank}.json").read_text()) for rank in range(2)]
    assert [list(record["not_finite"]) for record in records] == [[], broken]
    assert len(load_file(folder / "rank_00001.safetensors")["offsets"]) == records[1]["rows"] + 1


def test_rows_of_the_first_skipped_updates_of_a_run_are_kept_and_no_others(tmp_path):
    notes = list[str]()
    run: Any = SimpleNamespace(
        folder=tmp_path, present_step=1, world=SimpleNamespace(rank=0), console=SimpleNamespace(note=notes.append)
    )
    trainer: Any = SimpleNamespace(mesh=SimpleNamespace(model=SimpleNamespace(rank=0)))
    result: Any = SimpleNamespace(loss=math.nan, grad_norm=math.nan, lr=0.1)
    kept = SkippedBatches(run)
    for step in range(1, 7):
        run.present_step = step
        kept.keep("policy", trainer, make_rows(), result)
    # Those from before a resume count too.
    kept = SkippedBatches(run)
    for step in range(7, 12):
        run.present_step = step
        kept.keep("policy", trainer, make_rows(), result)
    assert len(notes) == 8
    assert {path.name for path in (tmp_path / "skipped").iterdir()} == {
        f"step_{step:06d}_policy_{step}" for step in range(1, 9)
    }


@pytest.mark.ranks
def test_a_reward_that_is_nan_leaves_its_row_out(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "reward:1:2:nan")
    finished(run_job("train", inline_config(tmp_path), f"run.dir={tmp_path / 'run'}", ranks=2))
    steps = metrics_of(tmp_path / "run")
    assert [(step["dock/dropped"], step["update/skipped"]) for step in steps] == [(0, 0), (1, 0), (0, 0)]


def test_too_many_skipped_updates_end_the_run_with_a_way_out(tmp_path):
    settings = ("optim.weight_decay=1e33", "train.max_skipped_in_a_row=2", "train.max_steps=9")
    job = run_job("train", inline_config(tmp_path), f"run.dir={tmp_path / 'run'}", *settings)
    assert job.returncode == 2 and "Traceback" not in job.stderr
    assert (
        "spmdrl: 2 updates in a row were skipped, loss " in job.stderr and "lower optim.lr (1.0e-3 now)" in job.stderr
    )
    assert len(metrics_of(tmp_path / "run")) == 3


def test_skips_in_a_row_are_counted_over_steps_and_updates_without_rows_are_none():
    before: dict[str, float] = {}
    counts = []
    for count, skipped, without in [(2, 2, 0), (2, 1, 1), (2, 2, 2), (2, 2, 1), (2, 1, 0)]:
        step = {"update/count": count, "update/skipped": skipped, "update/without_rows": without}
        before = counts_so_far(step, before)
        counts.append(before["health/updates_skipped_in_a_row"])
    assert counts == [2, 0, 0, 1, 0]
    assert too_many_skips({"health/updates_skipped_in_a_row": 9}, None) is None
