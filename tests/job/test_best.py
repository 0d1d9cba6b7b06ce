"""The best checkpoint stays and is found by its link; a checkpoint of the model alone is small and marked as one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from tests.support.jobs import finished, metrics_of, run_job, tiny_config

from spmdrl.algorithms.table import build_algorithm
from spmdrl.config.config import Config, load_config
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointConfig
from spmdrl.job.run.best_checkpoint import BestStep, better_of, is_due_for_best, point_to, unknown_metric
from spmdrl.job.run.model_card import model_card
from spmdrl.job.start.start_checks import CheckedRun, Verb
from spmdrl.resources.layout import UpdateLayout

MAX = CheckpointConfig(best="reward")
MIN = CheckpointConfig(best="loss", best_mode="min")
NONE = CheckpointConfig()
HELD_OUT = "data.eval=synthetic://addition?low=0&high=9&count=5&split=test"


def best_after(config, metric, values):
    best = None
    for step, value in enumerate(values, 1):
        best = better_of(config, best, step, {metric: value} if value is not None else {})
    return best


def test_the_best_is_the_highest_or_the_lowest_and_the_earlier_of_equal_ones():
    assert best_after(MAX, "reward", [0.1, 0.5, 0.5, 0.2]) == BestStep("reward", 2, 0.5)
    assert best_after(MIN, "loss", [0.5, 0.1, 0.1, 0.2]) == BestStep("loss", 2, 0.1)
    assert best_after(MAX, "reward", [math.nan, None, -1.0, math.nan]) == BestStep("reward", 3, -1.0)
    assert best_after(MAX, "loss", [1.0]) is None and best_after(NONE, "reward", [1.0]) is None


def test_the_best_by_another_metric_counts_no_more():
    assert better_of(MAX, BestStep("loss", 1, 9.0), 2, {"reward": 0.1}) == BestStep("reward", 2, 0.1)


def test_only_evaluations_are_saved_for_their_value_alone():
    config = CheckpointConfig(best="eval/accuracy")
    assert is_due_for_best(config, None, 1, {"eval/accuracy": 0.5})
    assert not is_due_for_best(config, BestStep("eval/accuracy", 1, 0.5), 2, {"eval/accuracy": 0.4})
    assert not is_due_for_best(config, None, 1, {}) and not is_due_for_best(MAX, None, 1, {"reward": 0.5})


def test_the_link_is_replaced_whole(tmp_path):
    for step in (3, 5):
        (tmp_path / f"step_{step:06d}").mkdir()
        (tmp_path / ".best.new").touch()
        point_to(BestStep("reward", step, 0.5), tmp_path)
        assert os.readlink(tmp_path / "best") == f"step_{step:06d}"


def test_a_metric_that_no_step_has_is_named_with_its_neighbours():
    assert "did you mean eval/accuracy" in unknown_metric("eval/acuracy", {"eval/accuracy": 1.0, "loss": 0.1})
    assert "the metrics are loss" in unknown_metric("quality", {"loss": 0.1})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_step_outlives_newer_ones_also_over_a_resume(tmp_path, mode):
    config, folder = tiny_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", "checkpoint.interval=1", "checkpoint.keep_last=1", "checkpoint.best=reward"]
    settings.append(f"checkpoint.best_mode={mode}")
    for num_steps in (4, 8):
        job = finished(run_job("train", config, *settings, f"train.max_steps={num_steps}"))
        rewards = [step["reward"] for step in metrics_of(folder)]
        best = 1 + rewards.index(max(rewards) if mode == "max" else min(rewards))
        kept = {f"step_{best:06d}", f"step_{num_steps:06d}", "best"}
        # The one before is kept until the next save, as the link led to it.
        assert kept <= {path.name for path in (folder / "checkpoints").iterdir()}
        assert len(list((folder / "checkpoints").iterdir())) <= len(kept) + 1
        assert os.readlink(folder / "checkpoints" / "best") == f"step_{best:06d}"
    assert "resumed from" in job.stdout
    by_link = ["model.make=null", f"model.path={folder}/checkpoints/best/model"]
    finished(run_job("eval", config, f"run.dir={tmp_path / 'eval'}", HELD_OUT, *by_link))


@pytest.mark.slow
def test_a_better_evaluation_is_saved_where_no_checkpoint_is_due(tmp_path):
    config, folder = tiny_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", "checkpoint.best=eval/reward", "eval.interval=1", HELD_OUT]
    finished(run_job("train", config, *settings, "train.max_steps=3"))
    values = {step["step"]: step["eval/reward"] for step in metrics_of(folder) if step["step"] > 0}
    best = min(step for step, value in values.items() if value == max(values.values()))
    record = json.loads((folder / "checkpoints" / "best" / "run.json").read_text())
    assert record["step"] == best and record["best"]["value"] == values[best]


@pytest.mark.slow
def test_the_model_alone_is_a_fraction_of_the_bytes_and_no_run_goes_on_from_it(tmp_path):
    config, folder = tiny_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", "checkpoint.model_only=true"]
    job = finished(run_job("train", config, *settings))
    assert "none can be resumed from" in job.stdout
    checkpoint = folder / "checkpoints" / "step_000003"
    assert not (checkpoint / "trainer").exists() and load_file(checkpoint / "model" / "model.safetensors")
    again = run_job("train", config, *settings)
    assert again.returncode == 2 and "was written with checkpoint.model_only" in again.stderr
    finished(run_job("train", config, *settings, "resume=never"))
    assert Path(f"{folder}.1").is_dir()


@pytest.mark.slow
def test_a_models_card_states_where_it_comes_from(tmp_path):
    config, folder = tiny_config(tmp_path), tmp_path / "run"
    finished(run_job("train", config, f"run.dir={folder}", "train.max_steps=1"))
    card = (folder / "checkpoints" / "step_000001" / "model" / "README.md").read_text()
    for fact in (
        "| steps | `1` |",
        "| base model | `random weights (model.make)` |",
        "share_of_digits",
        "synthetic://",
    ):
        assert fact in card


def checked(config: Config, verb: Verb, base_model: str) -> CheckedRun:
    return CheckedRun(verb, config, "", UpdateLayout(), build_algorithm(config.algo), {}, [], [], base_model)


def test_the_hub_reads_a_card_whose_values_hold_markup():
    config = load_config([], ["model.path=Qwen/Qwen2.5-0.5B", "data.train='a|b`c.jsonl'", "run.name=r1"]).value
    card = model_card(checked(config, "train", "Qwen/Qwen2.5-0.5B"), 7)
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen2.5-0.5B" and front["library_name"] == "transformers"
    assert front["tags"] == ["spmdrl", "grpo"] and "license" not in front
    assert "| training data | `a/b'c.jsonl` |" in card
    local = model_card(checked(config, "sft", "/models/mine"), 7)
    assert "base_model" not in yaml.safe_load(local.split("---")[1]) and "| base model | `/models/mine` |" in local
