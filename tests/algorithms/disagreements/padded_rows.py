"""Random rows as other trainers take them: matrices of rows by tokens, padded behind.

Shape letters: `B` rows, `T` tokens of the longest row, `R` tokens of all rows, packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tests.algorithms.random_rows import Rows
from torch import Tensor

RESPONSES = 4
PROMPTS = 3


@dataclass(frozen=True)
class PaddedRows:
    """Rows of PROMPTS prompts with RESPONSES responses each, and their matrices."""

    rows: Rows
    mask_BT: Tensor
    advantages_B: np.ndarray

    @classmethod
    def drawn(cls, seed: int) -> PaddedRows:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 6, size=PROMPTS * RESPONSES).tolist()
        groups = [prompt for prompt in range(PROMPTS) for _ in range(RESPONSES)]
        rows = replace(Rows.drawn(lengths, seed), groups=groups)
        mask_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return cls(rows, mask_BT.double(), rng.normal(size=len(lengths)))

    def matrix(self, values: Sequence[np.ndarray]) -> Tensor:
        """Values of each row's tokens as [B, T], 0 behind them."""
        return self.unpacked(torch.tensor(np.concatenate(values)))

    def unpacked(self, values_R: Tensor) -> Tensor:
        """Packed values as [B, T], 0 behind each row; gradients flow through."""
        out_BT = torch.zeros_like(self.mask_BT)
        out_BT[self.mask_BT > 0] = values_R
        return out_BT

    def packed(self, values_BT: Tensor) -> Tensor:
        return values_BT.expand_as(self.mask_BT)[self.mask_BT > 0].double()

    @property
    def token_advantages(self) -> list[np.ndarray]:
        return [np.full(length, value) for length, value in zip(self.rows.lengths, self.advantages_B, strict=True)]

    @property
    def as_pairs(self) -> PaddedRows:
        """The same rows as pairs, of which the first is preferred."""
        return replace(self, advantages_B=np.resize([1.0, -1.0], len(self.advantages_B)))

    def rewards_at_ends(self, kl_coef: float = 0.0) -> Tensor:
        """Rewards as [B, T]: a row's with its last token, each token's less `kl_coef` times its KL estimate."""
        rewards_BT = -kl_coef * self.matrix([self.rows.kl(row) for row in range(len(self.rows.lengths))])
        rewards_BT[torch.arange(len(self.rows.lengths)), torch.tensor(self.rows.lengths) - 1] += torch.tensor(
            self.rows.rewards
        )
        return rewards_BT
