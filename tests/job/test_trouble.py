"""A run whose updates do nothing is reported as such while it runs and in its outcome."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job, summary_of

REWARDS = """
def none(completions, **columns):
    return [None] * len(completions)

def huge(completions, **columns):
    return [1e14 * (1 + min(len(text), 8)) for text in completions]

def short(completions, answer, **columns):
    return [(len(text) == 1) / 2 + (text[:1] == right[-1]) / 2 for text, right in zip(completions, answer)]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "odd.py").write_text(REWARDS)
    return inline_config(tmp_path)


@pytest.mark.ranks
def test_skipped_updates_are_counted_once_on_two_ranks_and_named_in_the_outcome(tmp_path: Path, config: Path):
    run = f"run.dir={tmp_path / 'run'}"
    job = finished(run_job("train", config, run, "optim.weight_decay=1e33", "checkpoint.interval=2", ranks=2))
    lines = [line for line in job.stdout.splitlines() if line.startswith("grpo step")]
    assert ["skipped 0/1" in lines[0], "skipped 1/2" in lines[1], "skipped 2/3" in lines[2]] == [True] * 3
    assert job.stdout.count("WARNING") == 1 and "an update was SKIPPED (1 of 2 so far)" in job.stdout
    assert "grpo done, but 2 of 3 updates were skipped: loss or gradient norm not finite" in job.stdout
    assert summary_of(tmp_path / "run")["verdict"] == "done"
    assert metrics_of(tmp_path / "run")[-1]["health/updates_skipped"] == 2
    written = [json.loads(line) for line in (tmp_path / "run" / "checkpoints.jsonl").read_text().splitlines()]
    assert [(one["step"], one["folder"]) for one in written] == [(2, "step_000002"), (3, "step_000003")]
    assert 0 < summary_of(tmp_path / "run")["startup_seconds"] < summary_of(tmp_path / "run")["seconds"]


def test_rewards_that_are_all_missing_are_warned_of_in_the_first_step(tmp_path: Path, config: Path):
    functions = f"reward.functions=[{tmp_path / 'odd.py'}:none]"
    job = finished(run_job("train", config, f"run.dir={tmp_path / 'run'}", functions))
    assert "WARNING: step 1: an update was SKIPPED (1 of 1 so far): no row had a usable reward" in job.stdout
    assert "done, but 3 of 3 updates were skipped: no row had a usable reward" in job.stdout


def test_huge_rewards_end_with_a_summary(tmp_path: Path, config: Path):
    functions = f"reward.functions=[{tmp_path / 'odd.py'}:huge]"
    job = finished(run_job("train", config, f"run.dir={tmp_path / 'run'}", functions))
    assert "grpo done" in job.stdout and "RuntimeWarning" not in job.stderr
    assert summary_of(tmp_path / "run")["reward_last"] > 1e14


def test_a_policy_that_learns_one_answer_to_every_prompt_is_told_of_its_entropy(tmp_path: Path, config: Path):
    bad = "optim.lr=3e-2", "algo.entropy_coef=-0.3", "rollout.num_generations=16", "train.max_steps=24"
    functions, run = f"reward.functions=[{tmp_path / 'odd.py'}:short]", tmp_path / "run"
    job = finished(run_job("train", config, f"run.dir={run}", functions, *bad))
    found = [json.loads(line) for line in (run / "alerts.jsonl").read_text().splitlines()]
    assert "entropy-collapse" in {alert["symptom"] for alert in found} and "docs/bad_run.md#entropy-coll" in job.stdout
    assert '<b class="bad">entropy-collapse</b>' in (run / "report.html").read_text().partition("</header>")[0]
