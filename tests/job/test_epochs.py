"""A run's length in epochs: as many whole steps as the rows that can be used need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.jobs import finished, metrics_of, run_job, tiny_config

from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.job.start.start_checks import check_run
from spmdrl.verbs.check import refuse_what_ranks_would

BASE = ["model.make={}", "data.train=synthetic://addition?count=90&max_error=5"]
REWARDS = ["reward.functions=[exact]"]


def num_steps(verb: str, *overrides: str) -> int:
    rewards = REWARDS if verb in ("train", "sft") else []
    _, checked, _ = refuse_what_ranks_would(load_config([], [*BASE, *rewards, *overrides], verb), verb, None)
    assert checked.config.train.num_updates == checked.num_steps or verb != "train"
    return checked.num_steps


@pytest.mark.parametrize(
    ("verb", "overrides", "expected"),
    [
        ("train", ["rollout.prompts_per_step=8"], 100),
        ("train", ["rollout.prompts_per_step=8", "train.epochs=1"], 12),
        ("train", ["rollout.prompts_per_step=10", "train.epochs=0.7"], 7),
        ("train", ["rollout.prompts_per_step=10", "train.epochs=0.01"], 1),
        # As in TRL, verl and transformers, the number of steps decides if both are there.
        ("train", ["rollout.prompts_per_step=8", "train.epochs=3", "train.max_steps=5"], 5),
        ("train", ["rollout.prompts_per_step=8", "num_train_epochs=2"], 23),
        ("sft", ["sft.rows_per_step=30", "sft.epochs=2"], 6),
        ("sft", ["sft.rows_per_step=30", "num_train_epochs=3", "max_steps=4"], 4),
        ("sft", ["sft.rows_per_step=30", "max_epochs=3"], 9),
        ("reward-model", ["reward_model.epochs=1"], 2),
        ("preferences", ["total_epochs=1"], 2),
    ],
)
def test_epochs_are_steps_of_all_rows_rounded_up(verb: str, overrides: list[str], expected: int) -> None:
    assert num_steps(verb, *overrides) == expected


def test_rows_that_are_left_out_for_their_length_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    prompts = ["1+1=" if number % 2 else "1+" * 40 + "1=" for number in range(40)]
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    lines = [f"data.train={path}", "data.max_prompt_length=20", "data.on_bad_row=skip", "rollout.prompts_per_step=4"]
    assert num_steps("train", *lines, "train.epochs=1") == 5


def test_a_verb_without_steps_or_epochs_is_refused() -> None:
    with pytest.raises(ConfigError, match="sft.max_steps is 0, .* set it to the number of steps, or sft.epochs"):
        check_run(load_config([], BASE, "sft"), "sft")
    with pytest.raises(ConfigError, match="train.epochs"):
        load_config([], [*BASE, *REWARDS, "train.epochs=0"])


def test_a_run_of_epochs_ends_with_them_and_goes_on_with_more(tmp_path: Path) -> None:
    words = [tiny_config(tmp_path), f"run.dir={tmp_path / 'run'}", "train.max_steps=null", "sft.epochs=1"]
    words += ["sft.rows_per_step=20", "rollout.prompts_per_step=16"]
    first = finished(run_job("train", *words, "train.epochs=0.5"))
    assert "first sft: up to 1 epochs" in first.stdout and "0.5 epochs with rewards" in first.stdout
    assert [len(metrics_of(tmp_path / "run" / part)) for part in ("warm_start", "")] == [2, 2]
    finished(run_job("train", *words, "train.epochs=1"))
    assert [metrics["step"] for metrics in metrics_of(tmp_path / "run")] == [1, 2, 3]
