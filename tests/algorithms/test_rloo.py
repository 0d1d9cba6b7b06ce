"""RLOO against brute force in numpy float64: whole losses from rewards, log-probs and lengths, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.random_rows import MAX_LENGTH, Rows, packed, per_token, slopes
from tests.support.jobs import ROOT, finished, metrics_of, run_job

from spmdrl.algorithms.policy.rloo import Rloo
from spmdrl.algorithms.settings.policy_configs import RlooConfig
from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.nouns.batch import LossScope, TokenTerms

BETA = 0.3
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=10)


def advantages_by_numpy(rows: Rows, kl_in: str) -> list[np.ndarray]:
    """A_i = R_i - mean of the others' R_j (Eq. 8), per token of each row."""
    rewards = [
        rows.rewards[row] - (BETA * rows.kl(row).sum() if kl_in == "reward" else 0) for row in range(len(rows.groups))
    ]
    out = []
    for row, group in enumerate(rows.groups):
        others = [rewards[other] for other in range(len(rewards)) if rows.groups[other] == group and other != row]
        advantage = rewards[row] - np.mean(others) if others else 0.0
        tokens = np.full(rows.old[row].size, advantage)
        if kl_in == "advantage":
            tokens -= [BETA * rows.kl(row)[place:].sum() for place in range(tokens.size)]
        out.append(tokens)
    return out


def loss_by_numpy(policy: list[np.ndarray], rows: Rows, advantages: list[np.ndarray], config: RlooConfig) -> float:
    """The loss of one update on all rows, as its formula says."""
    losses = []
    for row, new in enumerate(policy):
        A, log_ratio = advantages[row], new - rows.old[row]
        if config.ratio_level == "none":
            tokens = -A * new
        else:
            ratio = np.exp(log_ratio if config.ratio_level == "token" else np.full(new.size, log_ratio.sum()))
            clipped = np.clip(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
            tokens = -np.minimum(ratio * A, clipped * A)
        row_loss = tokens.sum() if config.ratio_level != "sequence" else tokens[0]
        if config.kl_in == "loss":
            log_ratio_to_reference = rows.reference[row] - new
            row_loss += BETA * (np.exp(log_ratio_to_reference) - 1 - log_ratio_to_reference).sum()
        losses.append(row_loss)
    return float(np.mean(losses))


@pytest.mark.parametrize("kl_in", ["reward", "advantage", "loss"])
@given(LENGTHS, st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_advantages_leave_the_row_itself_out_of_its_baseline(kl_in, lengths, seed):
    rows = Rows.drawn(lengths, seed)
    algorithm = Rloo(RlooConfig(kl_coef=BETA, kl_in=kl_in, kl_estimator="k3" if kl_in == "loss" else "k1"))
    assert ("ref_logprobs" in algorithm.columns_for_credit()) == (kl_in != "loss")
    inputs = rows.inputs()
    expected = np.concatenate(advantages_by_numpy(rows, kl_in))
    np.testing.assert_allclose(per_token(algorithm.advantages(inputs), inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "config",
    [
        RlooConfig(kl_coef=BETA),
        RlooConfig(kl_coef=BETA, kl_in="advantage"),
        RlooConfig(kl_coef=BETA, kl_in="loss", kl_estimator="k3"),
        RlooConfig(kl_coef=BETA, ratio_level="sequence"),
        RlooConfig(kl_coef=BETA, ratio_level="token", clip_ratio_low=0.1, clip_ratio_high=0.15),
    ],
)
@given(LENGTHS, st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_losses_and_gradients_are_those_of_the_formulas(config, lengths, seed):
    rows, algorithm = Rows.drawn(lengths, seed), Rloo(config)
    advantages = advantages_by_numpy(rows, config.kl_in)
    policy_R = packed(rows.policy).requires_grad_()
    token_loss = algorithm.loss(rows.terms(policy_R, advantages))
    scope = LossScope(sum(lengths), len(lengths), MAX_LENGTH)
    loss = (algorithm.token_weights(torch.tensor(lengths), scope) * token_loss.loss_R).sum()
    assert loss.item() == pytest.approx(loss_by_numpy(rows.policy, rows, advantages, config), rel=1e-12, abs=1e-13)
    loss.backward()

    def by_numpy(policy: list[np.ndarray]) -> float:
        return loss_by_numpy(policy, rows, advantages, config)

    np.testing.assert_allclose(policy_R.grad.numpy(), slopes(by_numpy, rows.policy), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ratio_level", ["none", "token", "sequence"])
def test_in_the_only_update_every_ratio_has_the_gradient_of_reinforce(ratio_level):
    rows = Rows.drawn([3, 1, 4, 2], 5)
    algorithm = Rloo(RlooConfig(ratio_level=ratio_level))
    assert "old_logprobs" not in algorithm.columns_for_loss(1)
    assert ("old_logprobs" in algorithm.columns_for_loss(2)) == (ratio_level != "none")
    policy_R, advantages_R = packed(rows.policy).requires_grad_(), packed(advantages_by_numpy(rows, "loss"))
    lengths = torch.tensor([3, 1, 4, 2])
    row_R = torch.arange(4).repeat_interleave(lengths)
    token_loss = algorithm.loss(TokenTerms(policy_R, torch.zeros(10), {"advantages": advantages_R}, row_R, 4))
    (algorithm.token_weights(lengths, LossScope(10, 4, MAX_LENGTH)) * token_loss.loss_R).sum().backward()
    np.testing.assert_allclose(policy_R.grad.numpy(), -advantages_R.numpy() / 4, rtol=1e-6)


def test_equal_rewards_and_a_row_that_is_alone_have_no_advantage_at_all():
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 0.7]), torch.tensor([0, 0, 0, 1])
    assert Rloo(RlooConfig()).row_advantages(rewards, groups).tolist() == [0.0, 0.0, 0.0, 0.0]


MODEL = ["model.make={}", "data.train=synthetic://addition?count=10", "algo.name=rloo"]


def test_settings_that_do_not_go_together_are_refused():
    both = ["algo.kl_coef=0.1", "algo.kl_in=advantage", "algo.ratio_level=sequence"]
    with pytest.raises(ConfigError, match="a row's one ratio needs one for all; set algo.kl_in to reward"):
        load_config([], [*MODEL, *both])
    with pytest.raises(ConfigError, match="set algo.kl_estimator to k3 or k2"):
        load_config([], [*MODEL, "algo.kl_coef=0.1", "algo.kl_in=loss"])
    with pytest.raises(ConfigError, match="scale_rewards"):
        load_config([], [*MODEL, "algo.scale_rewards=none"])
    with pytest.raises(ConfigError, match=r"clip_ratio_high is 0.3, but with algo.ratio_level none there is no ratio"):
        load_config([], [*MODEL, "algo.clip_ratio_high=0.3"])


@pytest.mark.ranks
def test_a_job_with_rloo_trains(tmp_path):
    small = [
        "sft.max_steps=0",
        "train.max_steps=2",
        "checkpoint.interval=0",
        "data.eval=null",
        "rollout.prompts_per_step=4",
    ]
    config, folder = ROOT / "configs/debug/rloo.yaml", tmp_path / "run"
    finished(run_job("train", config, *small, f"run.dir={folder}", "algo.kl_in=advantage", ranks=2))
    steps = metrics_of(folder)
    assert [step["dock/trained"] for step in steps] == [32, 32]
    assert all(step["update/skipped"] == 0 for step in steps)
    # The first step's policy is the reference itself.
    assert abs(steps[0]["kl"]) < 1e-5 < abs(steps[1]["kl"])
