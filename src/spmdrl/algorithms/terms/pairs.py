"""Losses of pairs of responses to one prompt, of which one is preferred.

A pair's rows are consecutive. Shape letters: `R` response tokens, packed; `B` rows; [num_pairs] is half of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.algorithms.settings.preference_configs import PreferenceConfig
from spmdrl.algorithms.terms.losses import sums_and_lengths

PAIR = 2
"""rows of a pair"""
# Largest difference between two float32 passes in a token's log-prob; a step learns far more.
_NOISE = 1e-5


@dataclass(frozen=True)
class PairTokens:
    """Log-probs of pairs of rows; float, one value per response token."""

    logprobs_R: Tensor
    """carries the gradient"""
    reference_R: Tensor | None
    """log-probs under the reference; None without one"""
    signs_R: Tensor
    """1 at tokens of the preferred response, -1 at those of the other"""
    row_R: Tensor
    """int64: the row of each token, from 0; rows 2k and 2k + 1 are pair k"""
    num_rows: int


@dataclass(frozen=True)
class PairLoss:
    """Loss of each pair [num_pairs], with its gradient, and metrics with one value per pair."""

    losses: Tensor
    metrics: dict[str, Tensor]


def preference_loss(tokens: PairTokens, config: PreferenceConfig) -> PairLoss:
    """Return the loss of each pair by `config.loss_type`."""
    logprobs_R, row_R = tokens.logprobs_R, tokens.row_R
    ratios_R = logprobs_R if tokens.reference_R is None else logprobs_R - tokens.reference_R
    _, lengths_B = sums_and_lengths(ratios_R.detach(), row_R, tokens.num_rows)
    share_R = 1 / lengths_B[row_R]
    weights_R = share_R if config.length_normalized else torch.ones_like(share_R)
    weighted_R = tokens.signs_R * ratios_R * weights_R
    signed_B, _ = sums_and_lengths(weighted_R, row_R, tokens.num_rows)
    differences = _of_pairs(signed_B)
    losses = _loss_of_differences(differences, config)
    if config.sft_coef > 0:
        preferred_R = (tokens.signs_R > 0).to(share_R) * share_R
        likelihood_B, _ = sums_and_lengths(preferred_R * logprobs_R, row_R, tokens.num_rows)
        losses = losses - config.sft_coef * _of_pairs(likelihood_B)
    preferred_B, _ = sums_and_lengths((weighted_R * (tokens.signs_R > 0)).detach(), row_R, tokens.num_rows)
    preferred = config.beta * _of_pairs(preferred_B)
    margins = config.beta * differences.detach()
    noise_B, _ = sums_and_lengths(_NOISE * weights_R, row_R, tokens.num_rows)
    return PairLoss(
        losses,
        _reported(margins, config.beta * _of_pairs(noise_B))
        | {"preference/chosen": preferred, "preference/rejected": preferred - margins},
    )


def reward_loss(scores_B: Tensor, margins: Tensor | None, centring: float) -> PairLoss:
    """Return -log sigmoid(r_w - r_l - margin) + centring (r_w + r_l)^2 per pair; the preferred row comes first.

    Bradley and Terry's model of preferences, in Ouyang et al. 2022 (arXiv:2203.02155), Eq. 1; with a margin in Touvron
    et al. 2023 (arXiv:2307.09288), Eq. 2; with centring in Eisenstein et al. 2023 (arXiv:2312.09244), Eq. 2.
    """
    preferred, other = scores_B.view(-1, PAIR).unbind(1)
    differences = preferred - other
    losses = -F.logsigmoid(differences if margins is None else differences - margins)
    if centring > 0:
        losses = losses + centring * (preferred + other).square()
    return PairLoss(losses, _reported(differences.detach()))


def _loss_of_differences(differences: Tensor, config: PreferenceConfig) -> Tensor:
    if config.loss_type == "ipo":
        return (differences - 1 / (2 * config.beta)).square()
    logits, smoothing = config.beta * differences, config.label_smoothing
    if config.loss_type == "hinge":
        return F.relu(1 - logits)
    kept, swapped = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    if config.loss_type == "robust":
        return ((1 - smoothing) * kept - smoothing * swapped) / (1 - 2 * smoothing)
    return (1 - smoothing) * kept + smoothing * swapped


def _of_pairs(values_B: Tensor) -> Tensor:
    """Sum over the rows of each pair [num_pairs]."""
    return values_B.view(-1, PAIR).sum(1)


def _reported(margins: Tensor, noise: Tensor | float = 0.0) -> dict[str, Tensor]:
    """Return each pair's accuracy and margin of rewards; the accuracy is half where the margin is only noise."""
    is_right = 0.5 * ((margins > noise).to(margins) + (margins >= -noise).to(margins))
    return {"preference/accuracy": is_right, "preference/margin": margins}
