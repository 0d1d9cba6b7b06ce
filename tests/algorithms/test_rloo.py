"""RLOO against brute force in numpy float64: whole losses from rewards, log-probs and lengths, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.jobs import ROOT, finished, metrics_of, run_job

from spmdrl.algorithms.policy.rloo import Rloo, RlooConfig
from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.types import Batch, CreditInputs, LossScope, TokenTerms

BETA = 0.3
MAX_LENGTH = 7
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=10)


@dataclass(frozen=True)
class Rows:
    """Rows of prompts with up to four responses each; lists with an entry per row, of an entry per token."""

    rewards: np.ndarray
    groups: list[int]
    policy: list[np.ndarray]
    old: list[np.ndarray]
    rollout: list[np.ndarray]
    reference: list[np.ndarray]

    @classmethod
    def drawn(cls, lengths: list[int], seed: int) -> Rows:
        rng = np.random.default_rng(seed)
        old = [rng.normal(size=length) - 2 for length in lengths]
        nearby = [[row + 0.2 * rng.normal(size=row.size) for row in old] for _ in range(3)]
        groups = sorted(rng.integers(0, 1 + len(lengths) // 3, size=len(lengths)).tolist())
        return cls(
            rng.normal(size=len(lengths)).astype(np.float32).astype(np.float64), groups, nearby[0], old, *nearby[1:]
        )

    def kl(self, row: int) -> np.ndarray:
        """k1 per token, of the tokens as they were generated."""
        return self.rollout[row] - self.reference[row]


def packed(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.tensor(np.concatenate(rows))


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


def inputs_of(rows: Rows) -> CreditInputs:
    columns = Batch.of_rows(range(len(rows.groups)))
    columns.put_lists("rollout_logprobs", [row.tolist() for row in rows.rollout], torch.float64)
    columns.put_lists("ref_logprobs", [row.tolist() for row in rows.reference], torch.float64)
    lengths = torch.tensor([row.size for row in rows.old])
    return CreditInputs(torch.tensor(rows.rewards), torch.tensor(rows.groups), lengths, columns)


def per_token(advantages: torch.Tensor, inputs: CreditInputs) -> torch.Tensor:
    if len(advantages) == len(inputs.rewards_B):
        return advantages.repeat_interleave(inputs.lengths_B)
    return advantages


@pytest.mark.parametrize("kl_in", ["reward", "advantage", "loss"])
@given(LENGTHS, st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_advantages_leave_the_row_itself_out_of_its_baseline(kl_in, lengths, seed):
    rows = Rows.drawn(lengths, seed)
    algorithm = Rloo(RlooConfig(kl_coef=BETA, kl_in=kl_in, kl_estimator="k3" if kl_in == "loss" else "k1"))
    assert ("ref_logprobs" in algorithm.columns_for_credit()) == (kl_in != "loss")
    inputs = inputs_of(rows)
    expected = np.concatenate(advantages_by_numpy(rows, kl_in))
    np.testing.assert_allclose(per_token(algorithm.advantages(inputs), inputs).numpy(), expected, rtol=1e-6, atol=1e-6)


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
    row_R = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    columns = {
        "advantages": packed(advantages),
        "old_logprobs": packed(rows.old),
        "ref_logprobs": packed(rows.reference),
    }
    token_loss = algorithm.loss(TokenTerms(policy_R, torch.zeros(len(row_R)), columns, row_R, len(lengths)))
    scope = LossScope(sum(lengths), len(lengths), MAX_LENGTH)
    loss = (algorithm.token_weights(torch.tensor(lengths), scope).double() * token_loss.loss_R).sum()
    assert loss.item() == pytest.approx(loss_by_numpy(rows.policy, rows, advantages, config), rel=1e-6, abs=1e-7)
    loss.backward()
    np.testing.assert_allclose(policy_R.grad.numpy(), slopes(rows, advantages, config), rtol=1e-4, atol=1e-6)


def slopes(rows: Rows, advantages: list[np.ndarray], config: RlooConfig, step: float = 1e-6) -> np.ndarray:
    """The gradient by central differences."""
    out = []
    for row, values in enumerate(rows.policy):
        for place in range(values.size):
            sides = []
            for sign in (1, -1):
                moved = [other.copy() for other in rows.policy]
                moved[row][place] += sign * step
                sides.append(loss_by_numpy(moved, rows, advantages, config))
            out.append((sides[0] - sides[1]) / (2 * step))
    return np.asarray(out)


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
