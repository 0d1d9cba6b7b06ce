"""Whole jobs that generate more prompts in place of those that teach nothing: which ones depends on rewards alone."""

from __future__ import annotations

import json
import shutil
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job, summary_of, untimed, weights_digest

WANTED, GROUP, REFILLS, STEPS = 8, 4, 3, 4
ORDER = [f"{number}" for number in range(40)]
RIGHT = """
def begins_low(completions, **columns):
    return [float(text[:1] in ("0", "1", "2")) for text in completions]

def never(completions, **columns):
    return [0.0] * len(completions)
"""


def config_of(folder: Path) -> list[str]:
    (folder / "right.py").write_text(RIGHT)
    rows = [{"prompt": f"{left}+", "answer": left, "id": left} for left in ORDER]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        str(inline_config(folder)), f"data.train={folder}/rows.jsonl", "data.shuffle=false",
        f"reward.functions=[{folder}/right.py:begins_low]", f"algo={{name: dapo, max_refills: {REFILLS}}}",
        f"rollout.prompts_per_step={WANTED}", f"train.max_steps={STEPS}", "train.updates_per_step=2",
        "checkpoint.interval=1", "checkpoint.keep_last=9", "log.samples_per_step=1000",
    ]  # fmt: skip


def rows_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """All rows that each step generated, by their numbers."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], []).append(row)
    return {step: sorted(of_step, key=lambda row: row["row"]) for step, of_step in rows.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The settings of a run, and the folder in which one rank did it."""
    folder = tmp_path_factory.mktemp("refills")
    settings = config_of(folder)
    finished(run_job("train", *settings, f"run.dir={folder / 'run'}", f"debug.rollouts_to={folder / 'rollouts'}"))
    return settings, folder / "run"


@pytest.mark.ranks
def test_every_prompt_that_is_trained_has_right_and_wrong_responses_and_every_row_is_accounted_for(trained):
    _, folder = trained
    begun = []
    metrics = metrics_of(folder)
    assert max(step["refill/attempts"] for step in metrics) > 1 and sum(step["select/all_wrong"] for step in metrics)
    for step, rows in rows_of(folder).items():
        found = metrics[step - 1]
        assert [row["row"] for row in rows] == list(range(len(rows)))
        groups = [rows[at : at + GROUP] for at in range(0, len(rows), GROUP)]
        begun += [group[0]["prompt"] for group in groups]
        mixed = [len({row["reward"] for row in group}) == 2 for group in groups]
        is_trained = [group[0]["advantage"] is not None for group in groups]
        # The first ones in the order of prompts.
        assert is_trained == [is_mixed and sum(mixed[:at]) < WANTED for at, is_mixed in enumerate(mixed)]
        assert found["refill/prompts"] == len(groups) and found["refill/unfilled"] == 0
        assert found["dock/trained"] == WANTED * GROUP == sum(is_trained) * GROUP
        assert found.get("select/surplus", 0) == (sum(mixed) - WANTED) * GROUP
        assert found["select/all_wrong"] == GROUP * sum(not any(row["reward"] for row in group) for group in groups)
        reasons = ("all_right", "all_wrong", "no_reward", "surplus")
        assert (
            found["dock/dropped"]
            == found["select/dropped_rows"]
            == sum(found.get(f"select/{why}", 0) for why in reasons)
        )
        opened = WANTED * (1 + REFILLS) * GROUP
        assert found["dock/trained"] + found["dock/dropped"] + found["dock/deferred"] == opened
        assert found["dock/deferred"] == opened - len(rows)
        assert found["reward"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows), rel=1e-12)
        assert found["frac_reward_zero_std"] == pytest.approx(1 - sum(mixed) / len(mixed), rel=1e-6)
        assert (found["update/count"], found["update/without_rows"]) == (2, 0)
    # No prompt is passed over or comes twice.
    assert begun == [f"{place}+" for place in islice(cycle(ORDER), len(begun))]


@pytest.mark.ranks
@pytest.mark.slow
def test_another_number_of_ranks_trains_the_same_prompts(trained, tmp_path):
    settings, alone = trained
    finished(run_job("train", *settings, f"run.dir={tmp_path / 'two'}", ranks=2))
    for step, rows in rows_of(tmp_path / "two").items():
        for one, other in zip(rows_of(alone)[step], rows, strict=True):
            for key in ("row", "prompt", "response", "reward", "verdict", "advantage"):
                assert one[key] == other[key]
    for one, other in zip(metrics_of(alone), metrics_of(tmp_path / "two"), strict=True):
        counted = [name for name in one if name.startswith(("refill/", "select/", "dock/t", "dock/d", "reward"))]
        assert {name: one[name] for name in counted} == {name: other[name] for name in counted}
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_dies_goes_on_to_the_bit_with_prompts_and_kept_rollouts(trained, tmp_path):
    settings, alone = trained
    folder = tmp_path / "run"
    again = [*settings, f"run.dir={folder}", "checkpoint.keep_rollouts=true"]
    finished(run_job("train", *again))
    whole, digest = metrics_of(folder), weights_digest(folder, STEPS)
    assert digest == weights_digest(alone, STEPS) and untimed(whole) == untimed(metrics_of(alone))
    # As if it had been killed in step 3, without what it kept, and then in the update of step 4.
    for lost in ("checkpoints/step_000004", "checkpoints/step_000003", "rollouts"):
        shutil.rmtree(folder / lost)
    finished(run_job("train", *again))
    assert untimed(metrics_of(folder)) == untimed(whole) and weights_digest(folder, STEPS) == digest
    shutil.rmtree(folder / "checkpoints/step_000004")
    assert "step 4 goes on with the rollouts in" in finished(run_job("train", *again)).stdout
    resumed = metrics_of(folder)[3]
    assert weights_digest(folder, STEPS) == digest and "refill/attempts" in resumed
    names = [name for name in whole[3] if name.startswith(("select/", "reward", "dock/t", "dock/d", "frac", "refill/"))]
    assert {name: resumed[name] for name in names} == {name: whole[3][name] for name in names}
    # Without refills, the prompts that follow are the next ones.
    shutil.rmtree(folder / "checkpoints/step_000004")
    shutil.rmtree(folder / "rollouts")
    finished(run_job("train", *again, "algo.max_refills=0"))
    rows = rows_of(folder)
    num_begun = sum(len(of_step) for step, of_step in rows.items() if step < 4) // GROUP
    assert len(rows[4]) == WANTED * GROUP and rows[4][0]["prompt"] == f"{ORDER[num_begun % len(ORDER)]}+"


@pytest.mark.ranks
def test_recorded_rollouts_hold_all_attempts_and_samples_begin_with_a_prompt_that_is_trained(trained, tmp_path):
    settings, alone = trained
    recorded = [f"debug.rollouts_from={alone.parent / 'rollouts'}", "log.samples_per_step=4"]
    finished(run_job("train", *settings, f"run.dir={tmp_path / 'run'}", *recorded))
    whole, some = rows_of(alone), rows_of(tmp_path / "run")
    assert any(rows[0]["advantage"] is None for rows in whole.values())
    for step, rows in some.items():
        assert rows == [row for row in whole[step] if row["advantage"] is not None][:GROUP]
    assert weights_digest(tmp_path / "run", STEPS) == weights_digest(alone, STEPS)


@pytest.mark.ranks
def test_a_step_that_cannot_be_filled_says_so_once_and_the_run_goes_on(trained, tmp_path):
    settings, _ = trained
    functions = f"reward.functions=[{settings[3].partition('[')[2].partition(':')[0]}:never]"
    job = finished(run_job("train", *settings, functions, f"run.dir={tmp_path / 'run'}", ranks=2))
    assert job.stdout.count("WARNING: step 1: 8 prompts are missing of those that a step trains") == 1
    assert job.stdout.count("prompts are missing") == 1
    assert "done, but 8 of 8 updates were skipped: the algorithm left out every prompt" in job.stdout
    for step in metrics_of(tmp_path / "run"):
        assert (step["refill/attempts"], step["refill/prompts"], step["refill/unfilled"]) == (4, 32, 8)
        assert (step["dock/trained"], step["dock/dropped"], step["dock/deferred"]) == (0, 128, 0)
        assert step["update/without_rows"] == 2 and step["reward"] == 0
    assert summary_of(tmp_path / "run")["verdict"] == "done"


@pytest.mark.ranks
def test_prompts_that_take_several_steps_are_finished_before_steps_are_refilled(trained, tmp_path):
    settings, _ = trained
    own = [
        *settings, f"run.dir={tmp_path / 'run'}", "train.max_steps=2", "model.make.max_position_embeddings=64",
        "rollout.max_completion_length=48",
    ]  # fmt: skip
    partial = ["algo.max_refills=0", "rollout.partial_max_rounds=3", "rollout.partial_extra_prompts=8"]
    finished(run_job("train", *own, *partial))
    shutil.rmtree(tmp_path / "run/checkpoints/step_000002")
    refused = run_job("train", *own)
    assert refused.returncode == 2
    assert "algo.max_refills is 3, but an earlier part of the run, with rollout.partial_max_rounds" in refused.stderr
