"""What a job reports of the distance between rollout and trainer."""

from __future__ import annotations

import json
from statistics import fmean

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job


@pytest.mark.ranks
def test_every_step_and_every_shown_token_tell_of_mismatch_and_age(tmp_path):
    folder = tmp_path / "run"
    settings = [
        f"run.dir={folder}", "algo.rollout_is=seq-mask-tis", "rollout.num_generations=4", "log.samples_per_step=5",
        "train.updates_per_step=2", "train.skip_zero_advantage=false",
    ]  # fmt: skip
    finished(run_job("train", inline_config(tmp_path), *settings, ranks=2))
    steps = metrics_of(folder)
    for step in steps:
        assert 0 < step["mismatch/abs_mean"] <= step["mismatch/abs_max"] < 1e-5
        assert step["off_policy/max"] == step["off_policy/mean"] == 0
        assert step["off_policy/lag_0"] == step["generation/tokens"], "each token once, whoever trained on it"
        assert step["reward_p10"] <= step["reward"] <= step["reward_p90"]
        assert step["rollout_is/ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert step["rollout_is/masked_share"] == step["rollout_is/clipped_share"] == 0
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 5 * len(steps)
    largest = {step["step"]: 0.0 for step in steps}
    for sample in samples:
        texts, advantages, mismatches = zip(*sample["tokens"], strict=True)
        assert "".join(texts).startswith(sample["response"])
        assert set(advantages) == {sample["advantage"]}
        assert fmean(map(abs, mismatches)) == pytest.approx(sample["mismatch"])
        largest[sample["step"]] = max(largest[sample["step"]], *map(abs, mismatches))
    assert all(0 < largest[step["step"]] <= step["mismatch/abs_max"] for step in steps)


LONG = [
    "model.make.max_position_embeddings=160",
    "rollout.max_completion_length=100", "optim.lr=1e-3",
    "train.max_tokens_per_microbatch=700", "reward.timeout_seconds=30",
]  # fmt: skip
MODELS = {
    "dense": ["model.make.intermediate_size=43"],
    "sparse": ["model.make.model_type=qwen3_moe", "model.make.num_experts=8"],
    "hybrid": ["model.make.model_type=qwen3_5_text"],
    "sinks": ["model.make.model_type=gpt_oss", "model.make.num_experts=4", "model.make.sliding_window=6"],
}


@pytest.mark.ranks
@pytest.mark.cpu_only(reason="the batch-invariant operations are a CPU's")
@pytest.mark.parametrize(
    ("ranks", "model", "num_steps"),
    [
        (1, "dense", 3),
        *(pytest.param(2, model, 8, marks=pytest.mark.slow) for model in ("dense", "sparse")),
        pytest.param(1, "sparse", 3, marks=pytest.mark.slow),
        *(pytest.param(2, model, 3, marks=pytest.mark.slow) for model in ("hybrid", "sinks")),
    ],
)
def test_generator_and_trainer_agree_to_the_last_bit(tmp_path, ranks, model, num_steps):
    folder = tmp_path / "run"
    settings = [
        f"run.dir={folder}", "debug.batch_invariant=true", "train.epochs_per_step=2", f"train.max_steps={num_steps}",
        *LONG, *MODELS[model],
    ]  # fmt: skip
    finished(run_job("train", inline_config(tmp_path), *settings, ranks=ranks))
    steps = metrics_of(folder)
    assert len(steps) == num_steps
    assert all(step["mismatch/abs_max"] == 0 and step["grad_norm"] > 0 for step in steps)
    assert any(step["completions/min_length"] + 64 < step["completions/max_length"] for step in steps), "all alike"
    assert "time/old_logprobs" not in steps[0], "the log-probs of generation stand in for it"
