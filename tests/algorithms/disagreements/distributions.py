"""Losses of whole distributions, and of scores of responses: ours, verl's, TRL's and OpenRLHF's.

Shape letters: `R` tokens, `V` the vocabulary, `J` likeliest tokens of a teacher; `B` rows, in pairs.
"""

from __future__ import annotations

import types

import torch
from tests.algorithms.disagreements.ours import algorithm_of
from tests.algorithms.disagreements.padded_rows import PaddedRows
from tests.algorithms.disagreements.peers import TrlTrainer
from torch import Tensor
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from trl.trainer.reward_trainer import RewardTrainer
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

from spmdrl.algorithms.terms.pairs import reward_loss
from spmdrl.engines.training.heads import NOTHING
from spmdrl.nouns.batch import TokenTerms

VOCAB = 9


def logits(rows: PaddedRows, seed: int = 0) -> Tensor:
    """Of each token of all rows [R * V], in one dimension."""
    generator = torch.Generator().manual_seed(seed + sum(rows.rows.lengths))
    return torch.randn(sum(rows.rows.lengths) * VOCAB, generator=generator, dtype=torch.float64)


def _policy_and_teacher(rows: PaddedRows, flat: Tensor) -> tuple[Tensor, Tensor]:
    return flat.view(-1, VOCAB), logits(rows, seed=1).view(-1, VOCAB).log_softmax(-1)


def _with_rest(logprobs_RV: Tensor, ids_RJ: Tensor) -> Tensor:
    rest_R1 = logprobs_RV.scatter(1, ids_RJ, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=NOTHING)
    return torch.cat((logprobs_RV.gather(-1, ids_RJ), rest_R1), 1)


def our_divergence(rows: PaddedRows, flat: Tensor, *, divergence: str, beta: float = 0.5, top_k: int = VOCAB) -> Tensor:
    """gkd's loss, a mean over tokens."""
    policy_RV, teacher_RV = _policy_and_teacher(rows, flat)
    top = teacher_RV.topk(top_k, -1)
    algorithm = algorithm_of("gkd", divergence=divergence, beta=beta, top_k=top_k)
    teacher_RJ, policy_RJ = (_with_rest(all_RV.log_softmax(-1), top.indices) for all_RV in (teacher_RV, policy_RV))
    row_R = torch.zeros(len(policy_RV), dtype=torch.int64)
    terms = TokenTerms(policy_RJ[:, 0], policy_RJ[:, 0], {"teacher_top_logprobs": teacher_RJ}, row_R, 1, policy_RJ)
    return algorithm.policy_loss(terms, policy_RJ[:, 0]).loss_R.mean()


def trl_divergence(rows: PaddedRows, flat: Tensor, *, beta: float) -> Tensor:
    """DistillationTrainer's loss; hidden states are logits here, since the head is the identity."""
    policy_RV, teacher_RV = _policy_and_teacher(rows, flat)
    head = torch.eye(VOCAB, dtype=torch.float64)
    mask_1R = torch.ones(1, len(policy_RV))
    return _chunked_divergence_loss(policy_RV[None], teacher_RV[None], head, head, mask_1R, beta)[0]


def verl_divergence(rows: PaddedRows, flat: Tensor, *, top_k: int) -> Tensor:
    """verl's forward KL of a teacher's likeliest tokens, a mean over tokens."""
    policy_RV, teacher_RV = _policy_and_teacher(rows, flat)
    top = teacher_RV.topk(top_k, -1)
    nested = (torch.nested.as_nested_tensor([values], layout=torch.jagged) for values in (top.values, top.indices))
    settings = types.SimpleNamespace(use_chunked_topk=False, log_prob_min_clamp=None, loss_max_clamp=None)
    config = types.SimpleNamespace(distillation_loss=settings)
    found = compute_forward_kl_topk(policy_RV[None], *nested, config, "thd")
    return (found["distillation_losses"] if isinstance(found, dict) else found[0]).mean()


def scores(rows: PaddedRows) -> Tensor:
    return torch.tensor(rows.rows.rewards)


def our_reward_loss(rows: PaddedRows, scores_B: Tensor, *, margin: float | None, centring: float) -> Tensor:
    margins = None if margin is None else torch.full((len(scores_B) // 2,), margin)
    return reward_loss(scores_B, margins, centring).losses.mean()


def trl_reward_loss(rows: PaddedRows, scores_B: Tensor, *, margin: float | None, centring: float) -> Tensor:
    """RewardTrainer's loss, whose preferred rows come first."""
    trainer = TrlTrainer(rows, None, {"_total_train_tokens": 0}, {"center_rewards_coefficient": centring or None})
    outputs = types.SimpleNamespace(logits=torch.cat([scores_B[::2], scores_B[1::2]])[:, None])
    inputs = {} if margin is None else {"margin": margin}
    return RewardTrainer.compute_loss(trainer, lambda **_: outputs, inputs)
