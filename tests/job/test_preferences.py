"""Whole jobs that learn from pairs of responses: alike on two ranks, and after a crash."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.jobs import finished, metrics_of, run_job, tiny_config, untimed, weights_digest

ONLINE = ["algo={name: online_dpo, sft_coef: 0.1}", "train.updates_per_step=2", "checkpoint.interval=2"]
LEARNT = ("loss", "grad_norm", "preference/margin", "preference/accuracy", "preference/chosen", "preference/rejected")


@pytest.fixture(scope="module")
def online(tmp_path_factory) -> Path:
    """A run of four steps on two ranks."""
    folder = tmp_path_factory.mktemp("online")
    finished(run_job("train", tiny_config(folder), *ONLINE, "train.max_steps=4", f"run.dir={folder / 'run'}", ranks=2))
    return folder


@pytest.mark.ranks
def test_each_prompt_gives_its_best_and_worst_response_or_none(online):
    for step in metrics_of(online / "run"):
        reasons = [step["select/no_reward"], step["select/tied"], step["select/between"]]
        assert sum(reasons) == step["select/dropped_rows"] == step["dock/dropped"]
        num_tied = step["select/tied"] / 4
        assert step["select/between"] == 2 * (8 - num_tied) and step["update/rows"] == 2 * (8 - num_tied)
        assert step["preference/margin"] == pytest.approx(
            step["preference/chosen"] - step["preference/rejected"], abs=1e-6
        )
    assert metrics_of(online / "run")[-1]["preference/margin"] != 0


@pytest.mark.ranks
def test_online_dpo_on_one_rank_and_on_two_learns_the_same(online, tmp_path):
    run = tmp_path / "run"
    finished(run_job("train", tiny_config(tmp_path), *ONLINE, "train.max_steps=2", f"run.dir={run}"))
    for alone, together in zip(metrics_of(run), metrics_of(online / "run"), strict=False):
        for name in LEARNT:
            assert alone[name] == pytest.approx(together[name], rel=1e-4, abs=1e-6), name


@pytest.mark.ranks
def test_online_dpo_that_died_goes_on_to_the_last_bit(online, tmp_path):
    shutil.copytree(online, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints/step_000004")
    settings = [*ONLINE, "train.max_steps=4", f"run.dir={run}"]
    assert "resumed from" in finished(run_job("train", tiny_config(tmp_path), *settings, ranks=2)).stdout
    assert weights_digest(run, 4) == weights_digest(online / "run", 4)
    assert untimed(metrics_of(run)) == untimed(metrics_of(online / "run"))
