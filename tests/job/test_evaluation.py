"""Evaluations state what they measured and by which rule, and leave a training run's outcome alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import finished, run_job, summary_of, tiny_config

from spmdrl.job.evaluation.evaluator import evaluation_of

EVAL = "data.eval=synthetic://addition?low=0&high=9&count=10"


def _of(*rewards: float | None, num_samples: int = 1):
    records: list[dict[str, Any]] = [{"row": row, "reward": reward} for row, reward in enumerate(rewards)]
    return evaluation_of(records, num_samples)


def test_verdicts_have_an_accuracy_that_is_their_mean_with_its_rule():
    evaluation = _of(1.0, 0.0, 0.0, 1.0)
    assert evaluation.is_verdict and evaluation.mean_reward == evaluation.accuracy
    assert evaluation.described() == (
        "mean reward 0.500 (95% 0.150 to 0.850), accuracy 0.500 (95% 0.150 to 0.850) = share of answers with "
        "reward >= 1, 4 prompts"
    )
    assert evaluation.fields()["accuracy"] == 0.5


def test_other_rewards_have_a_mean_and_no_accuracy():
    evaluation = _of(0.25, 1.25, 2.0, 0.5)
    assert evaluation.mean_reward.value == 1.0 and evaluation.mean_reward.low < 0.3
    assert "accuracy 0" not in evaluation.described() and "reward >= 1 in 0.500" in evaluation.described()
    assert evaluation.fields()["accuracy"] is None and evaluation.fields()["share_of_reward_1"] == 0.5


def test_answers_without_a_reward_are_wrong_and_not_in_the_mean():
    evaluation = _of(1.0, None, 1.0, 0.0, None, None, num_samples=2)
    assert evaluation.num_failed == 3 and evaluation.accuracy.value == pytest.approx(1 / 3)
    # Of two prompts: 1, and the mean of 1 and 0.
    assert evaluation.mean_reward.value == 0.75
    assert math.isnan(_of(None).mean_reward.value) and json.loads(json.dumps(_of(None).fields()))


def test_huge_rewards_have_a_finite_mean():
    evaluation = _of(1e308, 1e308, 1e308)
    assert evaluation.mean_reward.value == 1e308 and evaluation.fields()["mean_reward_interval"] == [1e308, 1e308]
    assert _of(1e308, -1e308).fields()["mean_reward_interval"] is None


def test_eval_and_generate_leave_the_summary_of_a_training_run_alone(tmp_path: Path):
    config, run = tiny_config(tmp_path), tmp_path / "run"
    trained = finished(run_job("train", config, f"run.dir={run}", EVAL, "eval.before_train=true"))
    # Shares of digits are no verdicts.
    assert "  held-out  " in trained.stdout and "  accuracy  " not in trained.stdout
    before = (run / "summary.json").read_bytes()
    again = [config, f"run.dir={run}", EVAL, "model.make=null", f"model.path={run}", "reward.functions=[exact]"]
    shown = finished(run_job("eval", *again)).stdout
    assert "mean reward 0.000" in shown and "= share of answers with reward >= 1, 10 prompts" in shown
    finished(run_job("generate", *again, "eval.num_samples=2"))
    assert (run / "summary.json").read_bytes() == before and summary_of(run)["verdict"] == "done"
    found = json.loads((run / "eval.summary.json").read_text())
    assert found["accuracy"] == found["mean_reward"] == 0.0 and found["model"] == str(run)
    assert found["accuracy_rule"] == "share of answers with reward >= 1"
    assert json.loads((run / "generate.summary.json").read_text())["rows"] == 20
