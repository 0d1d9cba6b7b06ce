"""Whole runs that distil a teacher: the policy comes near it, alike on two ranks, with the swap, and after a crash."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.support.jobs import finished, inline_config, memory_at_ends, metrics_of, run_job, untimed, weights_digest

LARGER = (
    "model.make={hidden_size: 48, num_hidden_layers: 3, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 64, max_position_embeddings: 40, chars: '0123456789+= '}"
)
LEARNT = ("teacher/kl", "loss", "grad_norm", "reward")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """The folder of a run that taught a larger model to add."""
    folder = tmp_path_factory.mktemp("teacher")
    settings = [LARGER, "sft={max_steps: 30, rows_per_step: 64, optim: {lr: 3e-3}}", f"run.dir={folder / 'run'}"]
    finished(run_job("sft", inline_config(folder), *settings))
    return folder / "run"


def distilled(teacher: Path) -> list[str]:
    return [
        "algo.name=opd", f"teacher.path={teacher}", "train.max_steps=4", "checkpoint.interval=2",
        "rollout.temperature=0.8",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(teacher, tmp_path_factory) -> Path:
    """A run of four steps on two ranks with the swap."""
    folder = tmp_path_factory.mktemp("whole")
    settings = [*distilled(teacher), f"run.dir={folder / 'run'}", "reshard.swap=always"]
    finished(run_job("train", inline_config(folder), *settings, ranks=2))
    return folder


def test_the_policy_comes_near_its_teacher_and_rewards_count_for_nothing(teacher, tmp_path):
    # No response gets a reward, and all are trained on.
    (tmp_path / "none.py").write_text("def none(completions, **columns):\n    return [None] * len(completions)\n")
    settings = [*distilled(teacher), "train.max_steps=40", "checkpoint.interval=0", f"run.dir={tmp_path / 'run'}"]
    settings += [f"reward.functions=[{tmp_path / 'none.py'}:none]", "optim.lr=0.01"]
    finished(run_job("train", inline_config(tmp_path), *settings))
    distances = [step["teacher/kl"] for step in metrics_of(tmp_path / "run")]
    assert sum(distances[-3:]) < 0.6 * sum(distances[:3]), distances


@pytest.mark.ranks
@pytest.mark.slow
def test_one_rank_and_two_with_the_swap_distil_alike(teacher, whole, tmp_path):
    settings = [*distilled(teacher), f"run.dir={tmp_path / 'run'}", "reshard.swap=never"]
    finished(run_job("train", inline_config(tmp_path), *settings))
    for alone, together in zip(metrics_of(tmp_path / "run"), metrics_of(whole / "run"), strict=True):
        assert {name: alone[name] for name in LEARNT} == pytest.approx({name: together[name] for name in LEARNT}, 1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "shown", "swap"),
    [
        ("{pipeline: 2}", "pipeline 2", "never"),
        pytest.param("{tensor: 2}", "tensor 2", "always", marks=pytest.mark.slow),
        pytest.param("{data: 2}", "data 2", "never", marks=pytest.mark.slow),
    ],
)
def test_a_teacher_with_a_layout_of_its_own_rates_as_under_the_policys(teacher, whole, tmp_path, layout, shown, swap):
    settings = [*distilled(teacher), f"run.dir={tmp_path / 'run'}", f"reshard.swap={swap}"]
    job = finished(run_job("train", inline_config(tmp_path), *settings, f"teacher.layout={layout}", ranks=2))
    assert f"update shard 2, teacher {shown}" in job.stdout
    shared, own = metrics_of(whole / "run"), metrics_of(tmp_path / "run")
    assert own[0]["teacher/kl"] == pytest.approx(shared[0]["teacher/kl"], 1e-5)
    for one, other in zip(own, shared, strict=True):
        assert {name: one[name] for name in LEARNT} == pytest.approx({name: other[name] for name in LEARNT}, 1e-4)


@pytest.mark.ranks
def test_a_teacher_is_on_the_device_inside_its_own_state_alone(whole):
    at_end_of = memory_at_ends(whole / "run")
    assert all(held["d teacher_weights"] == 0 < held["o teacher_weights"] for held in at_end_of.values())
    assert at_end_of["teacher"]["p teacher_weights"] > 0 == at_end_of["generation"]["p teacher_weights"]


@pytest.mark.ranks
def test_a_run_that_died_goes_on_to_the_last_bit(teacher, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    # As if the job had died before the last checkpoint was written.
    shutil.rmtree(run / "checkpoints/step_000004")
    settings = [*distilled(teacher), f"run.dir={run}", "reshard.swap=always"]
    resumed = finished(run_job("train", inline_config(tmp_path), *settings, ranks=2))
    assert "resumed from" in resumed.stdout
    assert weights_digest(run, 4) == weights_digest(whole / "run", 4)
    swapped = "reshard/swapped_bytes"  # a run that goes on has no copy yet of weights that didn't change
    steps = [[step | {swapped: 0} for step in untimed(metrics_of(folder / "run"))] for folder in (tmp_path, whole)]
    assert steps[0] == steps[1]


@pytest.mark.ranks
def test_a_run_is_not_gone_on_with_under_another_teacher(teacher, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    other = whole / "run/initial_model"
    refused = run_job("train", inline_config(tmp_path), *distilled(other), f"run.dir={tmp_path / 'run'}")
    assert refused.returncode == 2 and "the teacher's weights was" in refused.stderr


WHOLE_DISTRIBUTION = ["algo={name: gkd, top_k: 6}", "optim.lr=0.01"]


@pytest.fixture(scope="module")
def alone(teacher, tmp_path_factory) -> Path:
    """A run on one rank that compares whole distributions."""
    folder = tmp_path_factory.mktemp("alone")
    settings = [*distilled(teacher), *WHOLE_DISTRIBUTION, "train.max_steps=30", f"run.dir={folder / 'run'}"]
    finished(run_job("train", inline_config(folder), *settings))
    return folder


def test_the_policys_distribution_comes_near_the_teachers(alone):
    divergences = [step["teacher/divergence"] for step in metrics_of(alone / "run")]
    assert sum(divergences[-3:]) < 0.5 * sum(divergences[:3]), divergences
    assert metrics_of(alone / "run")[-1]["health/steps_without_signal"] == 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    "axis", ["tensor", *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("shard", "context", "pipeline"))]
)
def test_two_ranks_compare_the_same_distributions(teacher, alone, tmp_path, axis):
    settings = [*distilled(teacher), *WHOLE_DISTRIBUTION, "train.max_steps=2", "checkpoint.interval=0"]
    settings += [f"resources.update={{shard: 1, {axis}: 2}}" if axis != "shard" else "resources.update.shard=2"]
    finished(run_job("train", inline_config(tmp_path), *settings, f"run.dir={tmp_path / 'run'}", ranks=2))
    names = ("teacher/divergence", "loss", "grad_norm", "reward", "entropy")
    for one, two in zip(metrics_of(alone / "run"), metrics_of(tmp_path / "run"), strict=False):
        assert {name: two[name] for name in names} == pytest.approx({name: one[name] for name in names}, 1e-4)


def with_hints(folder: Path) -> list[str]:
    """Settings of a run that is its own teacher, which sees a solved example before each prompt, or that alone."""
    rows = [
        {"prompt": f"{one}+{two}=", "answer": str(one + two), "hint": f"2+3=5 {one}+{two}=", "same": f"{one}+{two}="}
        for one in range(6)
        for two in range(6)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = [f"data.train={folder / 'rows.jsonl'}", "data.eval=null", "algo.name=opd", "train.max_steps=3"]
    return [*data, f"run.dir={folder / 'run'}"]


@pytest.mark.ranks
def test_a_policy_teaches_itself_by_a_prompt_with_more_in_it(tmp_path):
    config, settings, found = inline_config(tmp_path), with_hints(tmp_path), []
    for column, ranks in (("same", 1), ("hint", 1), ("hint", 2)):
        finished(run_job("train", config, *settings, f"teacher.prompt_column={column}", "resume=never", ranks=ranks))
        found.append([[step[name] for name in LEARNT] for step in metrics_of(tmp_path / "run")])
    (same, hint, together) = found
    assert all(abs(distance) < 1e-5 for distance, *_ in same), "given the same prompt it has the same log-probs"
    assert all(abs(distance) > 1e-3 for distance, *_ in hint)
    for alone, shared in zip(hint, together, strict=True):
        assert shared == pytest.approx(alone, 1e-4, abs=1e-7)
    timeline = (tmp_path / "run/timeline/rank_00000.jsonl").read_text()
    assert set(re.findall(r'"teacher_weights": (\d+)', timeline)) <= {"0"}, "there is no second model"


def test_a_prompt_that_the_teacher_can_not_see_is_refused(tmp_path):
    config, settings = inline_config(tmp_path), with_hints(tmp_path)

    def refused(*more: str) -> str:
        job = run_job("train", config, *settings, *more)
        assert job.returncode == 2 and "Traceback" not in job.stderr
        return job.stderr

    assert "which isn't a prompt; its columns are" in refused("teacher.prompt_column=solution")
    assert "positions for 1 to 5" in refused("teacher.prompt_column=hint", "rollout.max_completion_length=27")
    assert "teacher has neither path nor prompt_column" in refused("teacher={}")


def test_a_model_that_can_not_be_the_teacher_is_refused(teacher, tmp_path):
    config, model = inline_config(tmp_path), teacher / "initial_model"

    def refused(*settings: str) -> str:
        job = run_job("train", config, f"run.dir={tmp_path / 'run'}", *settings)
        assert job.returncode == 2 and "Traceback" not in job.stderr and not (tmp_path / "run/metrics.jsonl").exists()
        return job.stderr

    assert "algo.name grpo distils no teacher" in refused(f"teacher.path={teacher}")
    assert "teacher.path is empty" in refused("algo.name=opd", "teacher.path=''")
    assert "set teacher.path to a model" in refused("algo.name=opd")

    assert "lower algo.top_k" in refused("algo={name: gkd, top_k: 99}", f"teacher.path={teacher}")

    other = tmp_path / "other"
    shutil.copytree(model, other)
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    said = refused("algo.name=opd", f"teacher.path={other}")
    assert "they differ in 2 token ids" in said and "is '1' here and '2' there" in said

    narrow = tmp_path / "narrow"
    shutil.copytree(model, narrow)
    raw = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 16}))
    assert "16 positions, but the policy that it rates has" in refused("algo.name=opd", f"teacher.path={narrow}")
