"""The best checkpoint stays and is found by its link; a checkpoint of the model alone is small and marked as one."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.support.jobs import finished, inline_config, metrics_of, run_job, summary_of

from spmdrl.algorithms.table import build_algorithm
from spmdrl.config.config import Config, load_config
from spmdrl.config.reader import ConfigError
from spmdrl.job.run.best_checkpoint import BestStep, best_of, is_due_for_best, point_to, unknown_metric
from spmdrl.job.run.outcome import model_card
from spmdrl.job.run.resuming import RunRecord
from spmdrl.job.start.checked_run import CheckedRun, Verb
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.resources.layout import UpdateLayout

MAX = CheckpointConfig(best="reward")
MIN = CheckpointConfig(best="loss", best_mode="min")
NONE = CheckpointConfig()
HELD_OUT = "data.eval=synthetic://addition?low=0&high=9&count=5&split=test"


def best_after(config, metric, values):
    best = ()
    for step, value in enumerate(values, 1):
        best = best_of(config, best, step, {metric: value} if value is not None else {})
    return best


def steps_of(best):
    return [one.step for one in best]


def test_the_best_is_the_highest_or_the_lowest_and_the_earlier_of_equal_ones():
    assert best_after(MAX, "reward", [0.1, 0.5, 0.5, 0.2]) == (BestStep("reward", 2, 0.5),)
    assert best_after(MIN, "loss", [0.5, 0.1, 0.1, 0.2]) == (BestStep("loss", 2, 0.1),)
    assert best_after(MAX, "reward", [math.nan, None, -1.0, math.nan]) == (BestStep("reward", 3, -1.0),)
    assert best_after(MAX, "loss", [1.0]) == () and best_after(NONE, "reward", [1.0]) == ()


@given(
    st.lists(st.none() | st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, math.nan, math.inf])),
    st.integers(1, 4),
    st.sampled_from(["max", "min"]),
)
def test_the_n_best_are_the_first_n_of_all_steps_sorted_by_value(values, count, mode):
    config = CheckpointConfig(keep_best=count, best_mode=mode)
    usable = [(value, step) for step, value in enumerate(values, 1) if value is not None and not math.isnan(value)]
    ranked = sorted(usable, key=lambda one: one[0], reverse=mode == "max")
    assert steps_of(best_after(config, "eval/reward", values)) == [step for _, step in ranked[:count]]


def test_fewer_of_the_best_by_the_same_metric_count_after_a_change_of_settings():
    best = best_after(CheckpointConfig(best="reward", keep_best=3), "reward", [0.1, 0.5, 0.3])
    assert steps_of(best) == [2, 3, 1] and steps_of(best_of(MAX, best, 0, {})) == [2]
    assert best_of(MAX, [BestStep("loss", 1, 9.0)], 2, {"reward": 0.1}) == (BestStep("reward", 2, 0.1),)
    assert best_of(NONE, best, 4, {"reward": 1.0}) == ()


def test_only_evaluations_are_saved_for_their_value_alone():
    config = CheckpointConfig(best="eval/accuracy")
    first = [BestStep("eval/accuracy", 1, 0.5)]
    assert is_due_for_best(config, [], 1, {"eval/accuracy": 0.5})
    assert not any(is_due_for_best(config, first, 2, {"eval/accuracy": value}) for value in (0.4, 0.5))
    assert not is_due_for_best(config, [], 1, {}) and not is_due_for_best(MAX, [], 1, {"reward": 0.5})
    two = CheckpointConfig(best="eval/accuracy", keep_best=2)
    assert is_due_for_best(two, first, 2, {"eval/accuracy": 0.4})


def test_the_link_is_replaced_whole(tmp_path):
    for step in (3, 5):
        (tmp_path / f"step_{step:06d}").mkdir()
        (tmp_path / ".best.new").touch()
        point_to(BestStep("reward", step, 0.5), tmp_path)
        assert os.readlink(tmp_path / "best") == f"step_{step:06d}"


def test_a_metric_that_no_step_has_is_named_with_its_neighbours():
    assert "did you mean eval/accuracy" in unknown_metric("eval/acuracy", {"eval/accuracy": 1.0, "loss": 0.1})
    assert "the metrics are loss" in unknown_metric("quality", {"loss": 0.1})
    # Steps between two evaluations have none of their metrics.
    assert unknown_metric("eval/acuracy", {"loss": 0.1}) is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["checkpoint.keep_best=2"], "keep_best is 2, which keeps .* by eval/reward, but data.eval is not set, so"),
        (["checkpoint.best=eval/accuracy"], "checkpoint.best is eval/accuracy, .* but data.eval is not set"),
        (
            ["checkpoint.keep_best=2", HELD_OUT],
            "but eval.interval is 0, .* set data.eval and eval.interval, or checkpoint",
        ),
    ],
)
@pytest.mark.parametrize("verb", ["train", "sft"])
def test_the_best_by_an_evaluation_that_is_never_made_are_refused(tmp_path, settings, problem, verb):
    with pytest.raises(ConfigError, match=problem):
        check_run(load_config([inline_config(tmp_path)], ["reward.functions=[exact]", *settings]), verb)


def test_a_record_of_an_earlier_version_has_one_best_step_or_none():
    best = {"metric": "reward", "step": 3, "value": 0.5}
    read = [RunRecord.of_json(json.dumps({"step": 4, "identity": {}, "best": one})) for one in (None, best, [best])]
    assert [record.best for record in read] == [(), (BestStep(**best),), (BestStep(**best),)]
    assert RunRecord.of_json(read[1].to_json()) == read[1]
    with pytest.raises(ValueError, match="no usable best"):
        RunRecord.of_json(json.dumps({"step": 4, "identity": {}, "best": [{"step": 3}]}))


@pytest.mark.parametrize("mode", ["max", pytest.param("min", marks=pytest.mark.slow)])
def test_the_best_step_outlives_newer_ones_also_over_a_resume(tmp_path, mode):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", "checkpoint.interval=1", "checkpoint.keep_last=1", "checkpoint.best=reward"]
    settings.append(f"checkpoint.best_mode={mode}")
    for num_steps in (4, 8):
        job = finished(run_job("train", config, *settings, f"train.max_steps={num_steps}"))
        rewards = [step["reward"] for step in metrics_of(folder)]
        best = 1 + rewards.index(max(rewards) if mode == "max" else min(rewards))
        kept = {f"step_{best:06d}", f"step_{num_steps:06d}", "best"}
        assert kept == {path.name for path in (folder / "checkpoints").iterdir()}
        assert os.readlink(folder / "checkpoints" / "best") == f"step_{best:06d}"
    assert "resumed from" in job.stdout
    by_link = ["model.make=null", f"model.path={folder}/checkpoints/best/model"]
    finished(run_job("eval", config, f"run.dir={tmp_path / 'eval'}", HELD_OUT, *by_link))


def test_a_better_evaluation_is_saved_where_no_checkpoint_is_due(tmp_path):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", "checkpoint.best=eval/reward", "eval.interval=1", HELD_OUT]
    finished(run_job("train", config, *settings, "train.max_steps=3"))
    values = {step["step"]: step["eval/reward"] for step in metrics_of(folder) if step["step"] > 0}
    best = min(step for step, value in values.items() if value == max(values.values()))
    record = json.loads((folder / "checkpoints" / "best" / "run.json").read_text())
    assert record["step"] == best and record["best"][0]["value"] == values[best]


def killed_before(number: int) -> None:
    """End this process, in the place where it renames, links or deletes a checkpoint's folder for the n-th time."""
    calls = itertools.count(1)

    def counted(action):
        def act(path, *others, **settings):
            if "checkpoints/" in str(path) and next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return action(path, *others, **settings)

        return act

    os.rename, os.replace, shutil.rmtree = counted(os.rename), counted(os.replace), counted(shutil.rmtree)


@pytest.mark.slow
def test_the_best_ones_are_those_of_a_run_that_was_never_killed(tmp_path):
    config = inline_config(tmp_path)
    settings = [HELD_OUT, "eval.interval=1", "checkpoint.keep_best=2", "checkpoint.keep_last=1", "train.max_steps=7"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shown = finished(run_job("train", config, *settings, f"run.dir={whole}")).stdout
    values = [(-step["eval/reward"], step["step"]) for step in metrics_of(whole)]
    expected = sorted(values)[:2]
    assert expected != sorted(values[:3])[:2], "the best come early, so that none would be replaced"
    # While one that is no longer the best is deleted; before the link leads to the new one; before that is there.
    for number in (23, 9, 6):
        job = run_job("train", config, *settings, f"run.dir={killed}", prepare=partial(killed_before, number))
        assert job.returncode == -signal.SIGKILL
    finished(run_job("train", config, *settings, f"run.dir={killed}"))
    for folder in (whole, killed):
        steps = {step for _, step in expected} | {7}
        assert {path.name for path in (folder / "checkpoints").iterdir()} == {f"step_{step:06d}" for step in steps} | {
            "best"
        }
        assert os.readlink(folder / "checkpoints" / "best") == f"step_{expected[0][1]:06d}"
        named = [(-one["value"], one["step"]) for one in summary_of(folder)["best"]]
        assert named == expected and Path(summary_of(folder)["best"][0]["checkpoint"]).is_dir()
    assert f"/step_{expected[0][1]:06d}/model (eval/reward " in shown


def test_the_model_alone_is_a_fraction_of_the_bytes_and_no_run_goes_on_from_it(tmp_path):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", "checkpoint.model_only=true"]
    job = finished(run_job("train", config, *settings))
    assert "none can be resumed from" in job.stdout
    checkpoint = folder / "checkpoints" / "step_000003"
    assert not (checkpoint / "trainer").exists() and load_file(checkpoint / "model" / "model.safetensors")
    again = run_job("train", config, *settings)
    assert again.returncode == 2 and "was written with checkpoint.model_only" in again.stderr
    finished(run_job("train", config, *settings, "resume=never"))
    assert Path(f"{folder}.1").is_dir()


def test_a_models_card_states_where_it_comes_from(tmp_path):
    config, folder = inline_config(tmp_path), tmp_path / "run"
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
