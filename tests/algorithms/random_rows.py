"""Random rows of prompts for tests of algorithms, and losses of them put together by numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from spmdrl.nouns.batch import Batch, CreditInputs, CreditSettings, TokenTerms

MAX_LENGTH = 7
PART_WEIGHTS = (0.5, 2.0)
# By how much a teacher's likeliest tokens are less likely than the token that was drawn.
BELOW = (0.5, 0.9, 2.0)
SETTINGS = CreditSettings(("first", "second"), PART_WEIGHTS, MAX_LENGTH)


@dataclass(frozen=True)
class Rows:
    """Rows of prompts with up to four responses each; lists with an entry per row, of an entry per token."""

    rewards: np.ndarray
    groups: list[int]
    policy: list[np.ndarray]
    old: list[np.ndarray]
    rollout: list[np.ndarray]
    reference: list[np.ndarray]
    values: list[np.ndarray]
    returns: list[np.ndarray]
    teacher: list[np.ndarray]

    @classmethod
    def drawn(cls, lengths: list[int], seed: int) -> Rows:
        rng = np.random.default_rng(seed)
        old = [rng.normal(size=length) / 2 - 2 for length in lengths]
        nearby = [[row + 0.2 * rng.normal(size=row.size) for row in old] for _ in range(4)]
        critics = [[rng.normal(size=length) for length in lengths] for _ in range(2)]
        groups = sorted(rng.integers(0, 1 + len(lengths) // 3, size=len(lengths)).tolist())
        return cls(
            rng.normal(size=len(lengths)).astype(np.float32).astype(np.float64),
            groups,
            nearby[0],
            old,
            *nearby[1:3],
            *critics,
            nearby[3],
        )

    @property
    def lengths(self) -> list[int]:
        return [row.size for row in self.old]

    def kl(self, row: int) -> np.ndarray:
        """k1 per token, of the tokens as they were generated."""
        return self.rollout[row] - self.reference[row]

    def members(self, row: int) -> list[int]:
        """The rows of this row's group."""
        return [other for other, group in enumerate(self.groups) if group == self.groups[row]]

    @property
    def parts(self) -> np.ndarray:
        """Two functions' rewards of each row, whose sum with PART_WEIGHTS is the reward, as alike as the rewards."""
        return np.stack([0.5 * self.rewards / weight for weight in PART_WEIGHTS], 1)

    def inputs(self, dtype: torch.dtype = torch.float64) -> CreditInputs:
        columns = Batch.of_rows(range(len(self.groups)))
        columns.put_lists("reward_parts", self.parts.tolist(), dtype)
        columns.put_dense("copies", torch.tensor([1 + length % 3 for length in self.lengths]))
        columns.put_lists("rollout_logprobs", [row.tolist() for row in self.rollout], torch.float64)
        columns.put_lists("ref_logprobs", [row.tolist() for row in self.reference], torch.float64)
        columns.put_lists("values", [row.tolist() for row in self.values], torch.float64)
        columns.put_lists("returns", [row.tolist() for row in self.returns], torch.float64)
        columns.put_lists("teacher_logprobs", [row.tolist() for row in self.teacher], torch.float64)
        rewards_B = torch.tensor(self.rewards, dtype=dtype)
        return CreditInputs(rewards_B, torch.tensor(self.groups), torch.tensor(self.lengths), columns, SETTINGS)

    def terms(self, policy_R: torch.Tensor, advantages: list[np.ndarray]) -> TokenTerms:
        columns = {
            "advantages": packed(advantages),
            "old_logprobs": packed(self.old),
            "rollout_logprobs": packed(self.rollout),
            "ref_logprobs": packed(self.reference),
            "teacher_top_logprobs": packed(self.teacher)[:, None] - torch.tensor(BELOW, dtype=torch.float64),
        }
        lengths = torch.tensor(self.lengths)
        row_R = torch.arange(len(lengths)).repeat_interleave(lengths)
        others_RJ = policy_R[:, None] - torch.tensor(BELOW, dtype=torch.float64).flip(0)
        return TokenTerms(policy_R, torch.zeros_like(policy_R), columns, row_R, len(lengths), others_RJ)


def packed(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.tensor(np.concatenate(rows))


def per_token(advantages: torch.Tensor, inputs: CreditInputs) -> np.ndarray:
    if len(advantages) == len(inputs.rewards_B):
        advantages = advantages.repeat_interleave(inputs.lengths_B)
    return advantages.numpy()


def aggregated(losses: list[np.ndarray], aggregation: str) -> float:
    """One number from the token losses of each row."""
    if aggregation == "token-mean":
        return float(np.concatenate(losses).mean())
    of_row = {
        "seq-mean-token-mean": np.mean,
        "seq-mean-token-sum": np.sum,
        "seq-mean-token-sum-norm": lambda row: row.sum() / MAX_LENGTH,
    }[aggregation]
    return float(np.mean([of_row(row) for row in losses]))


def slopes(loss: Callable[[list[np.ndarray]], float], at: list[np.ndarray], step: float = 1e-6) -> np.ndarray:
    """The gradient of a function of rows, by central differences."""
    out = []
    for row, values in enumerate(at):
        for place in range(values.size):
            sides = []
            for sign in (1, -1):
                moved = [other.copy() for other in at]
                moved[row][place] += sign * step
                sides.append(loss(moved))
            out.append((sides[0] - sides[1]) / (2 * step))
    return np.asarray(out)
