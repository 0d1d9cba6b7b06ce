"""Whole runs with a reward model: its score is a part of the reward, alike on two ranks and after a crash."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.jobs import finished, inline_config, memory_at_ends, metrics_of, run_job, untimed, weights_digest

from spmdrl.engines.models.tokenizer import ModelTokenizer

LEARNT = ("rewards/model/mean", "reward", "loss", "grad_norm")


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    """A run of the verb reward-model on pairs of right and wrong sums."""
    folder = tmp_path_factory.mktemp("judge")
    settings = [
        "data.train=synthetic://addition?low=0&high=9&count=40&max_error=5",
        "reward_model={max_steps: 30, rows_per_step: 16, optim: {lr: 3.0e-3}}",
    ]
    finished(run_job("reward-model", inline_config(folder), *settings, f"run.dir={folder / 'run'}"))
    return folder / "run"


def judged(judge: Path) -> list[str]:
    return [f"reward.model.path={judge}", "reward.model.weight=0.5", "train.max_steps=4", "checkpoint.interval=2"]


@pytest.fixture(scope="module")
def whole(judge, tmp_path_factory) -> Path:
    """A run of four steps on two ranks with the swap."""
    folder = tmp_path_factory.mktemp("whole")
    settings = [*judged(judge), f"run.dir={folder / 'run'}", "reshard.swap=always", "log.samples_per_step=32"]
    finished(run_job("train", inline_config(folder), *settings, ranks=2))
    return folder


@pytest.mark.ranks
def test_the_scores_are_those_of_transformers_and_a_part_of_the_reward(judge, whole):
    transformers = pytest.importorskip("transformers")
    folder = judge / "checkpoints/step_000030/model"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer, num_ended = ModelTokenizer(folder), 0
    samples = [json.loads(line) for line in (whole / "run/samples.jsonl").read_text().splitlines()]
    for sample in samples:
        texts, parts = [text for text, *_ in sample["tokens"]], sample["parts"]
        assert sample["reward"] == pytest.approx(parts["share_of_digits"] + 0.5 * parts["model"], abs=1e-6)
        # A response shorter than the limit ends with the stop token; padding has no text either.
        ended = len(texts) < 8
        if "" in texts[: len(texts) - ended]:
            continue
        ids = tokenizer.encode(sample["prompt"] + "".join(texts)) + list(tokenizer.stop_token_ids[:1]) * ended
        with torch.no_grad():
            # In a batch of one without padding the last token is scored.
            expected = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits.item()
        assert parts["model"] == pytest.approx(expected, abs=1e-4)
        num_ended += ended
    assert 0 < num_ended < len(samples)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "swap"),
    [
        ("{tensor: 2}", "always"),
        *(pytest.param(layout, "never", marks=pytest.mark.slow) for layout in ("{data: 2}", "{pipeline: 2}")),
    ],
)
def test_under_a_layout_of_its_own_it_scores_as_under_the_policys(judge, whole, tmp_path, layout, swap):
    settings = [*judged(judge), f"run.dir={tmp_path / 'run'}", f"reshard.swap={swap}"]
    job = finished(run_job("train", inline_config(tmp_path), *settings, f"reward.model.layout={layout}", ranks=2))
    assert f"reward_model {layout[1:-1].replace(':', '')}" in job.stdout
    for own, shared in zip(metrics_of(tmp_path / "run"), metrics_of(whole / "run"), strict=True):
        expected = {name: shared[name] for name in LEARNT}
        assert {name: own[name] for name in LEARNT} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.ranks
def test_one_rank_and_two_with_the_swap_are_rewarded_alike(judge, whole, tmp_path):
    settings = [*judged(judge), f"run.dir={tmp_path / 'run'}", "reshard.swap=never"]
    finished(run_job("train", inline_config(tmp_path), *settings))
    for alone, together in zip(metrics_of(tmp_path / "run"), metrics_of(whole / "run"), strict=True):
        expected = {name: together[name] for name in LEARNT}
        assert {name: alone[name] for name in LEARNT} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.ranks
def test_the_model_is_on_the_device_inside_its_own_state_alone(whole):
    at_end_of = memory_at_ends(whole / "run")
    owner = "reward_model_weights"
    assert all(held[f"d {owner}"] == 0 < held[f"o {owner}"] for held in at_end_of.values())
    assert at_end_of["reward_model"][f"p {owner}"] > 0 == at_end_of["generation"][f"p {owner}"]


@pytest.mark.ranks
def test_a_run_that_died_goes_on_to_the_last_bit_and_only_with_the_same_model(judge, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    run, config = tmp_path / "run", inline_config(tmp_path)
    # As if the job had died before the last checkpoint was written.
    shutil.rmtree(run / "checkpoints/step_000004")
    other = tmp_path / "other"
    shutil.copytree(judge / "checkpoints/step_000030/model", other)
    (weights,) = other.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    refused = run_job("train", config, *judged(judge), f"reward.model.path={other}", f"run.dir={run}")
    assert refused.returncode == 2 and "the reward model's weights was" in refused.stderr
    settings = [*judged(judge), f"run.dir={run}", "reshard.swap=always", "log.samples_per_step=32"]
    assert "resumed from" in finished(run_job("train", config, *settings, ranks=2)).stdout
    assert weights_digest(run, 4) == weights_digest(whole / "run", 4)
    swapped = "reshard/swapped_bytes"  # a run that goes on has no copy yet of weights that didn't change
    steps = [[step | {swapped: 0} for step in untimed(metrics_of(folder / "run"))] for folder in (tmp_path, whole)]
    assert steps[0] == steps[1]


def test_the_policy_learns_what_the_model_alone_rewards(judge, tmp_path):
    settings = [f"reward.model.path={judge}", "reward.functions=[]", "train.max_steps=25", "optim.lr=0.01"]
    finished(run_job("train", inline_config(tmp_path), *settings, f"run.dir={tmp_path / 'run'}"))
    scores = [step["reward"] for step in metrics_of(tmp_path / "run")]
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + 0.5, scores


def test_a_response_that_no_function_applies_to_has_the_reward_models_score(judge, tmp_path):
    (tmp_path / "some.py").write_text(
        "def some(completions, **columns):\n    return [1.0 if text[:1].isdigit() else None for text in completions]\n"
    )
    settings = [f"reward.functions=[{tmp_path / 'some.py'}:some]", f"reward.model.path={judge}", "train.max_steps=1"]
    settings += ["algo.name=gdpo", "log.samples_per_step=32", f"run.dir={tmp_path / 'run'}"]
    finished(run_job("train", inline_config(tmp_path), *settings))
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert {sample["parts"].get("some") for sample in samples} == {1.0, None}
    for sample in samples:
        parts = sample["parts"]
        assert sample["verdict"] == "scored" and math.isfinite(parts["model"])
        assert sample["reward"] == pytest.approx(parts.get("some", 0.0) + parts["model"], rel=1e-6)


def test_what_can_not_be_a_reward_model_is_refused(judge, tmp_path):
    config, model = inline_config(tmp_path), judge / "checkpoints/step_000030/model"

    def refused(*settings: str) -> str:
        job = run_job("train", config, f"run.dir={tmp_path / 'run'}", *settings)
        assert job.returncode == 2 and "Traceback" not in job.stderr and not (tmp_path / "run/metrics.jsonl").exists()
        return job.stderr

    def changed(name: str, file: str, **entries: object) -> str:
        folder = tmp_path / name
        shutil.copytree(model, folder)
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | entries))
        return f"reward.model.path={folder}"

    assert "has a vocab head, which gives no score" in refused(f"reward.model.path={judge / 'initial_model'}")
    labels = {"0": "bad", "1": "good"}
    assert "with 2 labels" in refused(changed("two", "config.json", id2label=labels))
    assert "16 positions, but the policy" in refused(changed("narrow", "config.json", max_position_embeddings=16))
    words = json.loads((model / "tokenizer.json").read_text())["model"]
    words["vocab"]["1"], words["vocab"]["2"] = words["vocab"]["2"], words["vocab"]["1"]
    assert "they differ in 2 token ids" in refused(changed("other", "tokenizer.json", model=words))
    assert "set algo.max_refills to 0" in refused(f"reward.model.path={judge}", "algo.name=dapo")
    assert "there is no reward.model" in refused("reward.functions=[]")
    assert "reward.model has no path" in refused("reward.model.weight=2")
    evaluated = ["data.eval=synthetic://addition?low=0&high=9&count=9", "reward.functions=[]"]
    assert "evaluations judge by functions alone" in refused(f"reward.model.path={judge}", *evaluated)
