"""DAPO: GRPO with clip-higher, token loss, soft overlong punishment and dynamic sampling (arXiv:2503.14476).

    R' = R - clip((length - (longest - cache)) / cache, 0, 1)
    A  = (R' - mean R' of the group) / standard deviation of the group
    L  = -min(r A, clip(r, 1 - low, 1 + high) A), a mean over tokens, with high above low

Groups whose responses are all right or all wrong, by R and not by R', are left out (Eq. 11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.settings.policy_configs import DapoConfig
from spmdrl.algorithms.terms.advantages import Groups
from spmdrl.nouns.batch import CreditInputs, CreditSettings


@dataclass(frozen=True)
class Dapo(Grpo):
    """GRPO without prompts whose responses are all right or all wrong; lengths count in advantages alone."""

    config: DapoConfig

    @property
    def max_refills(self) -> int:
        return self.config.max_refills

    def conflict(self, settings: CreditSettings) -> str | None:
        filter_on, cache = self.config.filter_on, self.config.overlong_cache
        if filter_on is not None and filter_on not in settings.part_names:
            return (
                f"algo.filter_on is {filter_on!r}, but reward.functions has {', '.join(settings.part_names)}; name one "
                "of them, or leave algo.filter_on out to filter by the reward"
            )
        if cache is not None and cache > settings.max_length:
            return (
                f"algo.overlong_cache is {cache}, but responses have at most rollout.max_completion_length = "
                f"{settings.max_length} tokens; lower it, or leave it out for a fifth of them"
            )
        return super().conflict(settings)

    def columns_for_credit(self) -> frozenset[str]:
        return super().columns_for_credit() | ({"reward_parts"} if self.config.filter_on is not None else set())

    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        """Leave out every group with an accuracy of 0 or 1: all of its values are equal, and above 0 or not (Eq. 11).

        Rows without a reward don't count.
        """
        left_out = super().select(inputs)
        has_reward_B = ~left_out["no_reward"]
        groups, values_B = Groups(inputs.groups_B), self._judged_by(inputs)
        lowest_B = groups.least(values_B.where(has_reward_B, float("inf")))
        highest_B = -groups.least((-values_B).where(has_reward_B, float("inf")))
        is_alike_B = has_reward_B & (lowest_B == highest_B)
        return {**left_out, "all_right": is_alike_B & (lowest_B > 0), "all_wrong": is_alike_B & (lowest_B <= 0)}

    def advantages(self, inputs: CreditInputs) -> Tensor:
        rewards_B = inputs.rewards_B.double() - self._overlong(inputs)
        return super().advantages(replace(inputs, rewards_B=rewards_B)).to(inputs.rewards_B)

    def _judged_by(self, inputs: CreditInputs) -> Tensor:
        """Return the values [B] that groups are filtered by: those of `filter_on`, or the reward where it has none."""
        if self.config.filter_on is None:
            return inputs.rewards_B
        parts_BK = inputs.columns.values("reward_parts").view(len(inputs.rewards_B), -1)
        part_B = parts_BK[:, inputs.settings.part_names.index(self.config.filter_on)]
        return part_B.where(~part_B.isnan(), inputs.rewards_B)

    def _overlong(self, inputs: CreditInputs) -> Tensor:
        """Return the penalty for each row's length [B]: (length - (Lmax - Lcache)) / Lcache, within [0, 1] (Eq. 13)."""
        longest, cache = inputs.settings.max_length, self.config.overlong_cache
        if cache is None:
            cache = max(1, longest // 5)
        excess_B = inputs.lengths_B.double() - (longest - cache)
        return excess_B.clamp(0, cache) / max(cache, 1)
