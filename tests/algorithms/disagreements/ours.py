"""Our functions on the same rows. Each returns values per token, or a loss with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from tests.algorithms.disagreements.padded_rows import PaddedRows
from tests.algorithms.random_rows import MAX_LENGTH, packed
from torch import Tensor

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.policy.pf_ppo import filter_weights
from spmdrl.algorithms.table import ALGORITHMS, build_algorithm
from spmdrl.algorithms.terms.kl import kl_loss
from spmdrl.dataflow.stages.critic_states import ValueLoss, lambda_returns
from spmdrl.engines.training.packed_rows import MicroBatch
from spmdrl.nouns.batch import LossScope


class SimpleGamma:
    """The discount, as verl's estimators read it of a config."""

    def __init__(self, gamma: float):
        self.gamma = gamma


CONFIGS = {config.name: config for config in ALGORITHMS}


def algorithm_of(name: str, **keys: Any) -> Algorithm:
    return build_algorithm(CONFIGS[name](**keys))


def advantages(rows: PaddedRows, name: str, **keys: Any) -> Tensor:
    """The algorithm's advantages, per token [R]; of PPO those of lambda-returns."""
    algorithm, inputs = (
        algorithm_of(name, **{key: value for key, value in keys.items() if key != "lam"}),
        rows.rows.inputs(),
    )
    if name == "ppo":
        values_R = inputs.columns.values("values")
        returns_R = lambda_returns(
            algorithm.token_rewards(inputs), values_R, inputs.lengths_B, gamma=1.0, lam=keys.get("lam", 1.0)
        )
        inputs.columns.put_ragged("returns", returns_R, inputs.columns.offsets("values"))
    result = algorithm.advantages(inputs)
    return result if len(result) == int(inputs.lengths_B.sum()) else result.repeat_interleave(inputs.lengths_B)


def loss(rows: PaddedRows, policy_R: Tensor, name: str, **keys: Any) -> Tensor:
    """The algorithm's loss of all rows, with random advantages."""
    algorithm = algorithm_of(name, **keys)
    token_loss = algorithm.loss(rows.rows.terms(policy_R, rows.token_advantages))
    lengths_B = torch.tensor(rows.rows.lengths)
    scope = LossScope(int(lengths_B.sum()), len(lengths_B), MAX_LENGTH)
    return (algorithm.token_weights(lengths_B, scope) * token_loss.loss_R).sum()


def value_loss(rows: PaddedRows, values_R: Tensor, clip: float) -> Tensor:
    micro = MicroBatch.__new__(MicroBatch)
    object.__setattr__(micro, "response", {"values": packed(rows.rows.values), "returns": packed(rows.rows.returns)})
    return ValueLoss(len(values_R), clip)(values_R, micro).loss


def draw_shares(rows: PaddedRows, scope: str, **keys: Any) -> Tensor:
    """The chance of each row [B] to be the one that PF-PPO draws, of its prompt's or of all."""
    rewards_B, groups_B = torch.tensor(rows.rows.rewards), torch.tensor(rows.rows.groups)
    config = CONFIGS["pf_ppo"](filter_scope=scope, **keys)
    shares_B = torch.zeros_like(rewards_B)
    for group in groups_B.unique() if scope == "prompt" else [groups_B]:
        members = groups_B == group
        weights = filter_weights(rewards_B[members], config.filter, config.filter_power)
        shares_B[members] = weights / weights.sum() * members.sum() / len(members)
    return shares_B


def kl_term(rows: PaddedRows, policy_R: Tensor, estimator: Any, gradient: Any) -> Tensor:
    """The KL term's mean over tokens."""
    return kl_loss(policy_R, packed(rows.rows.reference), packed(rows.rows.old), estimator, gradient).mean()
