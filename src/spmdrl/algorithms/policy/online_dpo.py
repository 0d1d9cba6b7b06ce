"""Online DPO: the best and the worst response to each prompt are a pair (arXiv:2402.04792; DPO, arXiv:2305.18290).

    h = log(p / p_ref) of the best response - log(p / p_ref) of the worst, each summed over its tokens
    L = -log sigmoid(beta h), a mean over pairs

Prompts whose responses all have the same reward are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.policy_gradient import FromRewards
from spmdrl.algorithms.settings.preference_configs import OnlineDpoConfig
from spmdrl.algorithms.terms.advantages import Groups
from spmdrl.algorithms.terms.losses import sums_and_lengths
from spmdrl.algorithms.terms.pairs import PAIR, PairTokens, preference_loss
from spmdrl.nouns.batch import CreditInputs, TokenLoss, TokenTerms


@dataclass(frozen=True)
class OnlineDpo(FromRewards):
    """The loss of `terms.pairs` for each prompt's best and worst response; advantages are 1 and -1."""

    config: OnlineDpoConfig

    @property
    def min_responses(self) -> int:
        return PAIR

    @property
    def unit_size(self) -> int:
        return PAIR

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        config = self.config
        weighs_kl = config.kl_in_loss and config.kl_gradient == "importance"
        reference = frozenset(() if config.reference_free else {"ref_logprobs"})
        # The ratio is to the reference, not to the policy that the step began with.
        return super().columns_for_loss(num_updates if weighs_kl else 1) | reference

    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        is_scored_B = ~inputs.rewards_B.isnan()
        is_used_B = self.row_advantages(inputs.rewards_B, inputs.groups_B) != 0
        has_pair_B = Groups(inputs.groups_B).sums(is_used_B) > 0
        others = {"tied": is_scored_B & ~has_pair_B, "between": is_scored_B & has_pair_B & ~is_used_B}
        return {**super().select(inputs), **others}

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        """Return 1 for each group's best row, -1 for its worst (the first of equals); 0 for others and ties."""
        groups, group_B = groups_B.unique(return_inverse=True)
        high_B = _extreme(rewards_B.nan_to_num(-torch.inf), group_B, len(groups), "amax")
        low_B = _extreme(rewards_B.nan_to_num(torch.inf), group_B, len(groups), "amin")
        signs_B, place_B = torch.zeros_like(rewards_B), torch.arange(len(group_B))
        for sign, extreme_B in ((1, high_B), (-1, low_B)):
            is_there_B = (rewards_B == extreme_B) & (high_B > low_B)
            first_B = _extreme(place_B.where(is_there_B, len(group_B)), group_B, len(groups), "amin")
            signs_B[is_there_B & (place_B == first_B)] = sign
        return signs_B

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        columns, row_R = terms.columns, terms.row_of_token_R
        reference_R = None if self.config.reference_free else columns["ref_logprobs"]
        tokens = PairTokens(terms.logprobs_R, reference_R, columns["advantages"], row_R, terms.num_rows)
        found, pair_R = preference_loss(tokens, self.config), row_R // PAIR
        # The mean over rows of sums over tokens counts a pair as two rows: each token bears an equal part of its loss.
        _, num_tokens = sums_and_lengths(terms.logprobs_R.detach(), pair_R, len(found.losses))
        return TokenLoss((PAIR * found.losses / num_tokens)[pair_R], found.metrics)


def _extreme(values_B: Tensor, group_B: Tensor, num_groups: int, kind: Literal["amax", "amin"]) -> Tensor:
    """Return at each row its group's largest or smallest value [B]."""
    return values_B.new_zeros(num_groups).scatter_reduce_(0, group_B, values_B, kind, include_self=False)[group_B]
