"""Evaluations state what they measured and by which rule, and leave a training run's outcome alone."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job, summary_of

from spmdrl.config.config import EvalConfig
from spmdrl.job.evaluator import evaluation_of

EVAL = "data.eval=synthetic://addition?low=0&high=9&count=10"


def _of(*rewards: float | None, num_samples: int = 1, passes: tuple[int, ...] = ()):
    records: list[dict[str, Any]] = [{"row": row, "reward": reward} for row, reward in enumerate(rewards)]
    return evaluation_of(records, num_samples, passes)


def _counted_pass(is_right_GN: np.ndarray, k: int) -> tuple[float, float, float]:
    """pass@k by trying all choices of k answers to each prompt, and the ends of the normal interval over prompts."""
    values_G = np.array([np.mean([any(chosen) for chosen in combinations(group, k)]) for group in is_right_GN])
    margin = 1.959963984540054 * values_G.std(ddof=1) / np.sqrt(len(values_G))
    return values_G.mean(), max(0.0, values_G.mean() - margin), min(1.0, values_G.mean() + margin)


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


def test_passes_are_those_that_counting_finds_in_all_choices_of_answers():
    rewards_GN = np.random.default_rng(0).choice([0.0, 0.25, 1.0, np.nan], size=(7, 6))
    rewards = [None if np.isnan(reward) else float(reward) for reward in rewards_GN.flat]
    evaluation = _of(*rewards, num_samples=6, passes=(1, 2, 4, 6))
    for k, estimate in evaluation.pass_at.items():
        counted = _counted_pass(rewards_GN >= 1, k)
        assert (estimate.value, estimate.low, estimate.high) == pytest.approx(counted, abs=1e-12)
        assert evaluation.fields()[f"pass_at_{k}_interval"] == [estimate.low, estimate.high]
    assert evaluation.pass_at[1] == evaluation.accuracy and "pass@4 0." in evaluation.described()


def test_a_pass_of_more_answers_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"pass_at is \[8, 1\], but eval.num_samples is 4, and pass@8 needs"):
        EvalConfig(num_samples=4, pass_at=(8, 1))
    assert EvalConfig(num_samples=8, pass_at=(8, 1, 8)).passes == (1, 8)
    assert EvalConfig(num_samples=8).passes == (8,) and EvalConfig().passes == ()


def test_huge_rewards_have_a_finite_mean():
    evaluation = _of(1e308, 1e308, 1e308)
    assert evaluation.mean_reward.value == 1e308 and evaluation.fields()["mean_reward_interval"] == [1e308, 1e308]
    assert _of(1e308, -1e308).fields()["mean_reward_interval"] is None


def test_eval_and_generate_leave_the_summary_of_a_training_run_alone(tmp_path: Path):
    config, run = inline_config(tmp_path), tmp_path / "run"
    passes = ["eval.num_samples=4", "eval.pass_at=[1, 3]", "eval.interval=2"]
    trained = finished(run_job("train", config, f"run.dir={run}", EVAL, "eval.before_train=true", *passes))
    # Shares of digits are no verdicts.
    assert "  held-out  " in trained.stdout and "  accuracy  " not in trained.stdout
    before, metrics = (run / "summary.json").read_bytes(), {step["step"]: step for step in metrics_of(run)}
    for step in (0, 2, 3):
        records = [json.loads(line) for line in (run / "eval" / f"step_{step:06d}.jsonl").read_text().splitlines()]
        is_right_GN = np.array([record["reward"] >= 1 for record in records]).reshape(10, 4)
        for k in (1, 3):
            found = [metrics[step][f"eval/pass_at_{k}{end}"] for end in ("", "_low", "_high")]
            assert found == pytest.approx(_counted_pass(is_right_GN, k), abs=1e-12)
    assert "eval/pass_at_1" not in metrics[1]
    assert summary_of(run)["pass_at_3_after"] == metrics[3]["eval/pass_at_3"]
    again = [config, f"run.dir={run}", EVAL, "model.make=null", f"model.path={run}"]
    shown = finished(run_job("eval", *again, "reward.functions=[exact]")).stdout
    assert "mean reward 0.000" in shown and "= share of answers with reward >= 1, 10 prompts" in shown
    finished(run_job("generate", *again, "eval.num_samples=2"))
    assert (run / "summary.json").read_bytes() == before and summary_of(run)["verdict"] == "done"
    [summary] = run.glob("eval/run_step_000003_*/eval.summary.json")
    found = json.loads(summary.read_text())
    assert found["accuracy"] == found["mean_reward"] == 0.0 and found["model"] == str(run)
    assert found["accuracy_rule"] == "share of answers with reward >= 1"
    [answers] = run.glob("generate/run_step_000003_*/generated.jsonl")
    assert json.loads(answers.with_name("generate.summary.json").read_text())["rows"] == 20
    other = [argument.replace(f"model.path={run}", f"model.path={run}/initial_model") for argument in map(str, again)]
    kept = summary.read_bytes()
    finished(run_job("eval", *other))
    assert summary.read_bytes() == kept and len(list(run.glob("eval/initial_model_*/eval.jsonl"))) == 1
    (tmp_path / "few.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    finished(run_job("eval", *again, f"data.eval={tmp_path}/few.jsonl"))
    assert summary.read_bytes() == kept and len(list(run.glob("eval/run_step_000003_few_*/eval.jsonl"))) == 1
    kept = answers.read_bytes()
    shown = finished(run_job("generate", *other)).stderr
    [others] = run.glob("generate/initial_model_*/generated.jsonl")
    assert answers.read_bytes() == kept != others.read_bytes() and f"answers  {others}" in shown
