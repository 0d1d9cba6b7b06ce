"""The bench of lags: rewards count by the policy that earned them, and costs are those of runs with the same seed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spmdrl.config.config import load_config
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.runtime.launch import read_launch_environment
from tests.bench.harness.train_runs import words_of
from tests.bench.learning.lags_bench import (
    TASKS,
    LagRun,
    add_arguments,
    by_policy,
    run,
    run_folder,
    run_settings,
    start_folder,
    start_settings,
    table_rows,
)
from tests.bench.learning.test_algorithms_bench import SVG, write_finished
from tests.support.ranks import rank_environment


def lag_run(seed: int, lag: int, rewards: list[float], accuracy: float = 0.5) -> LagRun:
    return LagRun("addition", seed, lag, "tis", dict(enumerate(rewards)), 0.25, accuracy, 0.0)


def parsed(work: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--work", str(work), *words])


def test_a_batch_counts_for_the_policy_that_generated_it():
    # Policies earn 0, 0.1, 0.2, ...; with a lag of two steps the first one generates three batches.
    earned = [0.1 * num for num in range(14)]
    assert by_policy([0.3, 0.0, -0.3, *earned[1:]], 2) == pytest.approx(by_policy(earned, 0))
    means = by_policy(earned, 0)
    assert means[1] == pytest.approx(0.05) and means[13] == pytest.approx(0.85)


def test_a_cost_is_the_median_ratio_to_the_run_without_a_lag_and_with_the_same_seed():
    rising = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    slow = [0.0, 0.0, 0.2, 0.4, 0.5, 0.9]
    runs = [lag_run(seed, 0, rising, 0.7 + 0.1 * seed) for seed in (0, 1, 2)]
    runs += [lag_run(0, 1, rising), lag_run(1, 1, slow), lag_run(2, 1, slow)]
    # Of another seed, whose run without a lag ends at 2.0, half is 1.0.
    runs += [lag_run(3, 0, [2 * reward for reward in rising], 1.0), lag_run(3, 1, slow)]
    without, with_lag = table_rows(runs)
    assert (without["lag"], without["seeds"], without["lowest"], without["highest"]) == (0, 4, 0.7, 1.0)
    assert (without["to 50%"], without["cost, 50%"], without["to 90%"]) == (3, 1, 5)
    # 3, 4, 4 and never after 3: ratios of 1, 4/3, 4/3 and infinity.
    assert with_lag["to 50%"] == 4 and with_lag["cost, 50%"] == pytest.approx(4 / 3)
    never = table_rows([lag_run(0, 0, rising), lag_run(0, 1, rising[:3])])[1]
    assert never["to 90%"] is None and never["cost, 90%"] is None


@pytest.mark.parametrize("task", TASKS)
def test_finished_runs_become_rows_and_two_panels_per_task(task: str, tmp_path: Path):
    start, picture = start_folder(task, 1, tmp_path), tmp_path / "curves.svg"
    write_finished("sft", start, start_settings(1))
    variants = [(0, "none"), (1, "tis"), (4, "tis"), (1, "none"), (4, "none")]
    for lag, rule in variants:
        folder = run_folder(task, 1, lag, rule, tmp_path)
        write_finished("train", folder, run_settings(task, 1, lag, rule, start))
        write_metrics(folder, lag)
    words = ["--tasks", task, "--lags", "1", "4", "--picture", str(picture)]
    rows = run(parsed(tmp_path, *words, "--seeds", "1")).rows
    assert run(parsed(tmp_path, *words, "--finished")).rows == rows
    assert [(row["lag"], row["correction"]) for row in rows] == variants
    assert all((row["accuracy"], row["to 90%"], row["cost, 90%"]) == (0.75, 11, 1) for row in rows), rows
    root = ElementTree.parse(picture).getroot()
    assert len(list(root.iter(f"{SVG}g"))) == 2 and len(list(root.iter(f"{SVG}polyline"))) == 6
    texts = [text for element in root.iter(f"{SVG}text") for text in element.itertext()]
    assert texts.count("lag 4") == 2 and f"{task}, none" in texts


def write_metrics(folder: Path, lag: int) -> None:
    """Rewards of 0 from the first policies and of 1 from the third step on; evaluations at both ends."""
    lines = [{"step": step, "reward": float(step - 1 - lag >= 3)} for step in range(1, 40)]
    before, after = ({f"eval/accuracy{bound}": value for bound in ("", "_low", "_high")} for value in (0.25, 0.75))
    lines = [{"step": 0, **before}, *lines[:-1], lines[-1] | after]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_task_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(ValueError, match="'sums' isn't one of addition"):
        run(parsed(tmp_path / "work", "--tasks", "sums"))
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("lag", "rule"), [(0, "none"), (4, "tis")])
def test_a_run_can_start_with_the_settings_of_every_task(task: str, lag: int, rule: str, tmp_path: Path):
    sizes = MakeConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    make_model_folder(tmp_path / "start", sizes, seed=0)
    _, *words = words_of("train", run_settings(task, 1, lag, rule, tmp_path / "start"), tmp_path / "run")
    launch = read_launch_environment(rank_environment(0, 2, 2, port=0))
    checked = check_run(load_config([TASKS[task].config], words), "train", launch=launch)
    assert (checked.config.rollout.lag, checked.config.algo.rollout_is, checked.config.sft.max_steps) == (lag, rule, 0)
