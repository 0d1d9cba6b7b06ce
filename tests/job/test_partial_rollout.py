"""Whole jobs whose responses may take several steps: stopped at any point, they go on as if nothing had happened."""

from __future__ import annotations

import shutil

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job, untimed, weights_digest

LONG = [
    "model.make.max_position_embeddings=64", "rollout.max_completion_length=48", "rollout.partial_max_rounds=3",
    "rollout.partial_extra_prompts=8", "algo.rollout_is=tis", "train.max_steps=6", "checkpoint.interval=2",
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_dies_between_two_checkpoints_goes_on_to_the_bit(tmp_path):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", *LONG, "checkpoint.keep_last=9"]
    started = finished(run_job("train", config, *settings, ranks=2)).stdout
    assert "which prompts a step trains depends on the number of replicas (2 here)" in started
    whole, digest = untimed(metrics_of(folder)), weights_digest(folder, 6)
    assert [step["dock/deferred"] for step in whole] == [32] * 5 + [0]
    assert [step["dock/trained"] + step["dock/dropped"] for step in whole] == [32] * 6
    assert max(step["off_policy/max"] for step in whole) == 2, "no response took three steps"
    # As if it had been killed in step 5.
    shutil.rmtree(folder / "checkpoints" / "step_000006")
    assert "after step 4" in finished(run_job("train", config, *settings, ranks=2)).stdout
    assert untimed(metrics_of(folder)) == whole
    assert weights_digest(folder, 6) == digest
    # Another number of ranks goes on with the same responses.
    shutil.rmtree(folder / "checkpoints" / "step_000006")
    finished(run_job("train", config, *settings, ranks=1))
    again = metrics_of(folder)
    assert [step["dock/deferred"] for step in again] == [32] * 5 + [0]
    assert again[4]["off_policy/max"] > 0
    # Without further rounds, what was begun is finished before new prompts.
    shutil.rmtree(folder / "checkpoints" / "step_000006")
    at_once = ["rollout.partial_max_rounds=1", "rollout.partial_extra_prompts=null"]
    finished(run_job("train", config, *settings, *at_once))
    again = metrics_of(folder)
    assert [step["dock/deferred"] for step in again] == [32] * 4 + [0, 0]
    assert [step["off_policy/max"] > 0 for step in again[4:]] == [True, False]


@pytest.mark.ranks
def test_kept_rollouts_bring_their_steps_pending_groups(tmp_path):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", *LONG, "train.max_steps=4", "checkpoint.keep_rollouts=true"]
    finished(run_job("train", config, *settings, ranks=2))
    whole, digest = metrics_of(folder), weights_digest(folder, 4)
    # As if it had been killed in the update of step 3, whose rollouts are the last that were kept.
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    resumed = finished(run_job("train", config, *settings, ranks=2))
    assert "step 3 goes on with the rollouts in" in resumed.stdout
    again = metrics_of(folder)
    assert [step["generation/tokens"] for step in again] == [step["generation/tokens"] for step in whole]
    assert again[2]["dock/deferred"] == 32 and again[3]["dock/deferred"] == 0
    assert [step["reward"] for step in again] == [step["reward"] for step in whole]
    assert weights_digest(folder, 4) == digest
