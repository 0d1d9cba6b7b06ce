"""What algorithms share whose advantages come from one reward per response, without a critic.

Shape letters: `B` rows, `R` response tokens of those rows, packed.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.terms.advantages import row_sums, sums_to_row_end
from spmdrl.nouns.batch import CreditInputs


class FromRewards(Algorithm):
    """Advantages per row from rewards; with `kl_in` reward or advantage the KL term lowers the one or the other."""

    def advantages(self, inputs: CreditInputs) -> Tensor:
        if not self.config.kl_in_credit:
            return self.row_advantages(inputs.rewards_B, inputs.groups_B)
        kl_R, lengths_B, kl_coef = self.generated_kl(inputs), inputs.lengths_B, self.config.kl_coef
        if self.config.kl_in == "reward":
            return self.row_advantages(inputs.rewards_B - kl_coef * row_sums(kl_R, lengths_B), inputs.groups_B)
        advantages_B = self.row_advantages(inputs.rewards_B, inputs.groups_B)
        return advantages_B.repeat_interleave(lengths_B) - kl_coef * sums_to_row_end(kl_R, lengths_B)

    @abstractmethod
    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        """The advantage of each row [B] from the rewards of a whole batch; `groups_B` numbers the prompts.

        Sums are float64; the result has the dtype of the rewards.
        """
