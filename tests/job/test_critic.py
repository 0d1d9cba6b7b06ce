"""Whole runs with a critic, by PPO: it learns, alike on two ranks, with the swap, and after a crash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.jobs import ROOT, finished, inline_config, metrics_of, run_job, untimed

TINY = [
    "algo={name: ppo, kl_coef: 0.05, kl_target: 0.02, kl_gain: 0.9}",
    "critic={warmup_steps: 2, clip: 0.5, lam: 0.95, truncation: bootstrap, optim: {lr: 1e-3}}",
    "train.max_steps=4", "train.updates_per_step=2",
]  # fmt: skip
LEARNT = ("critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/lr", "reward")


def weights_of(folder: Path, step: int, model: str = "critic/model") -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / model / "model.safetensors")


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_copies(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run that goes on has no copy yet of weights that didn't change."""
    return [{name: step[name] for name in step if name != "reshard/swapped_bytes"} for step in untimed(metrics)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of four steps on two ranks with the swap, in which the policy is trained from step 3 on."""
    folder = tmp_path_factory.mktemp("critic")
    settings = [f"run.dir={folder / 'run'}", "checkpoint.interval=2", "reshard.swap=always"]
    finished(run_job("train", inline_config(folder), *TINY, *settings, ranks=2))
    return folder


@pytest.mark.slow
def test_a_critic_learns_the_return_of_a_policy_that_stays_as_it_is(tmp_path):
    finished(run_job("train", ROOT / "configs/debug/critic.yaml", f"run.dir={tmp_path}"))
    explained = [step["critic/explained_variance"] for step in metrics_of(tmp_path)]
    assert explained[0] == 0 and min(explained[-5:]) > 0.8
    assert same_weights(load_file(tmp_path / "initial_model/model.safetensors"), weights_of(tmp_path, 60, "model"))
    assert not any("loss" in step for step in metrics_of(tmp_path))


@pytest.mark.ranks
def test_the_policy_waits_for_the_critics_warmup_and_is_trained_after_it(whole):
    initial, metrics = load_file(whole / "run/initial_model/model.safetensors"), metrics_of(whole / "run")
    assert same_weights(initial, weights_of(whole / "run", 2, "model"))
    assert not same_weights(initial, weights_of(whole / "run", 4, "model"))
    assert ["loss" in step for step in metrics] == [False, False, True, True]
    assert all("critic/loss" in step and step["critic/skipped"] == 0 for step in metrics)
    # As long as the policy is the reference, the KL coefficient falls as fast as it may.
    assert [step["kl_coef"] for step in metrics] == pytest.approx([0.05 * 0.82**number for number in range(4)])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("reference", "critic"),
    [
        ("tensor", "data"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("data", "pipeline"), ("shard", "tensor"))),
    ],
)
def test_a_reference_and_a_critic_with_layouts_of_their_own_are_as_under_the_policys(
    whole, tmp_path, reference, critic
):
    settings = [f"run.dir={tmp_path}", "checkpoint.interval=2", "reshard.swap=always", *TINY]
    settings += [f"reference.layout.{reference}=2", f"critic.layout.{critic}=2"]
    finished(run_job("train", inline_config(tmp_path), *settings, ranks=2))
    for one, other in zip(metrics_of(tmp_path), metrics_of(whole / "run"), strict=True):
        names = {"kl", "loss", *LEARNT} & other.keys()
        assert {name: one[name] for name in names} == pytest.approx({name: other[name] for name in names}, 1e-4, 1e-6)
    expected = weights_of(whole / "run", 4)
    for name, weight in weights_of(tmp_path, 4).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks
def test_one_rank_and_two_with_the_swap_train_the_same_critic(whole, tmp_path):
    config, run = inline_config(tmp_path), tmp_path / "run"
    finished(run_job("train", config, *TINY, "train.max_steps=2", f"run.dir={run}", "reshard.swap=never"))
    for alone, together in zip(metrics_of(run), metrics_of(whole / "run"), strict=False):
        assert {name: alone[name] for name in LEARNT} == pytest.approx({name: together[name] for name in LEARNT}, 1e-4)
    expected = weights_of(whole / "run", 2)
    for name, weight in weights_of(run, 2).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)
    # Held on the device (d) and on the host (o), at the boundary before generation.
    timeline = [json.loads(line) for line in (whole / "run/timeline/rank_00000.jsonl").read_text().splitlines()]
    held = next(record for record in timeline if record.get("h", [""])[0] == "to_generation")
    for owner in ("critic_weights", "critic_optimizer"):
        assert held["d"][owner] == 0 < held["o"][owner]


@pytest.mark.ranks
def test_the_same_rows_are_drawn_and_trained_as_often_on_one_rank_and_on_two(tmp_path):
    settings = ["algo={name: pf_ppo, filter: best-worst}", "critic={}", "train.max_steps=2", "train.updates_per_step=2"]
    for ranks in (1, 2):
        finished(run_job("train", inline_config(tmp_path), *settings, f"run.dir={tmp_path / str(ranks)}", ranks=ranks))
    names = (*LEARNT, "select/filtered", "loss", "grad_norm", "entropy", "frac_advantage_zero")
    one, two = ([{name: step[name] for name in names} for step in metrics_of(tmp_path / run)] for run in "12")
    for alone, together in zip(one, two, strict=True):
        assert alone == pytest.approx(together, rel=1e-3, abs=1e-6)
        assert 0 < alone["select/filtered"] < 32
    dropped = [step["dock/dropped"] for step in metrics_of(tmp_path / "2")]
    assert dropped == [step["select/filtered"] for step in two]


@pytest.mark.ranks
def test_a_run_that_died_goes_on_with_the_same_critic_to_the_last_bit(whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    # As if the job had died before the last checkpoint was written.
    shutil.rmtree(run / "checkpoints/step_000004")
    settings = [f"run.dir={run}", "checkpoint.interval=2", "reshard.swap=always"]
    resumed = finished(run_job("train", inline_config(tmp_path), *TINY, *settings, ranks=2))
    assert "resumed from" in resumed.stdout
    for model in ("model", "critic/model"):
        assert same_weights(weights_of(run, 4, model), weights_of(whole / "run", 4, model))
    assert without_copies(metrics_of(run)) == without_copies(metrics_of(whole / "run"))


@pytest.mark.ranks
def test_a_critics_checkpoint_goes_on_under_another_layout_and_opens_in_transformers(whole, tmp_path):
    transformers = pytest.importorskip("transformers")
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints/step_000004")
    finished(run_job("train", inline_config(tmp_path), *TINY, f"run.dir={run}"))
    after, before = metrics_of(run)[-1], metrics_of(whole / "run")[-1]
    assert {name: after[name] for name in LEARNT} == pytest.approx({name: before[name] for name in LEARNT}, 1e-4)
    folder = run / "checkpoints/step_000004/critic/model"
    _, report = transformers.AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.ranks
def test_a_run_with_a_critic_is_not_gone_on_with_without_one(whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    refused = run_job("train", inline_config(tmp_path), "train.max_steps=6", f"run.dir={tmp_path / 'run'}")
    assert refused.returncode == 2 and 'critic was "the policy\'s weights" and is None' in refused.stderr


@pytest.mark.ranks
def test_a_critic_that_was_trained_elsewhere_begins_with_what_it_learnt(whole, tmp_path):
    critic, run = whole / "run/checkpoints/step_000004/critic/model", tmp_path / "run"
    settings = [f"run.dir={run}", f"critic.path={critic}", "critic.warmup_steps=1", "critic.optim.lr=0"]
    finished(run_job("train", inline_config(tmp_path), *settings, "train.max_steps=1"))
    assert metrics_of(run)[0]["critic/explained_variance"] != 0, "a new head gives 0 throughout"
    assert same_weights(weights_of(run, 1), load_file(critic / "model.safetensors"))


def test_a_critic_that_can_not_read_the_policys_tokens_is_refused(tmp_path):
    config = inline_config(tmp_path)
    finished(run_job("train", config, "train.max_steps=1", f"run.dir={tmp_path / 'run'}"))
    model, critic = tmp_path / "run/initial_model", tmp_path / "critic"
    shutil.copytree(model, critic)
    raw = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 16}))
    refused = run_job("train", config, f"run.dir={tmp_path / 'other'}", f"critic.path={critic}")
    assert refused.returncode == 2
    assert "16 positions, but the policy that it rates has" in refused.stderr and "Traceback" not in refused.stderr
    settings = ["train.max_steps=1", "algo.name=ppo", "algo.clip_ratio_high=0.3"]
    begun = finished(run_job("train", config, f"run.dir={tmp_path / 'other'}", f"critic.path={model}", *settings))
    assert metrics_of(tmp_path / "other")[0]["critic/explained_variance"] == 0
    assert "algo   ppo | clip_ratio_high 0.3 (0.2)\n" in begun.stdout
