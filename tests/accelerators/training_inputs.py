"""Rows and losses that traces train on."""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.settings.policy_configs import GrpoConfig, RlooConfig
from spmdrl.algorithms.table import build_algorithm
from spmdrl.dataflow.stages.update import PolicyLoss
from spmdrl.engines.training.packed_rows import TokenRows
from spmdrl.nouns.batch import offsets_of

# 64 tokens: each expert of every model gets the same whole number of rows.
LENGTHS = [10, 1, 29, 24]


def rows_of(lengths: list[int], **columns: Tensor) -> TokenRows:
    """Rows with prompts of one token."""
    num_tokens = sum(lengths)
    return TokenRows(
        torch.arange(num_tokens) % 7, offsets_of(lengths), torch.ones(len(lengths), dtype=torch.int64), columns
    )


def policy_rows() -> TokenRows:
    """Rows with all columns that a policy's losses read."""
    names = ("weights", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "versions")
    return rows_of(LENGTHS, **{name: torch.ones(sum(LENGTHS) - len(LENGTHS)) for name in names})


def losses() -> dict[str, PolicyLoss]:
    """Losses that differ in what they compute on the device."""
    configs = {
        "grpo": GrpoConfig(),
        "grpo, KL in the loss": GrpoConfig(kl_coef=0.1),
        "grpo, importance weights per row": GrpoConfig(rollout_is="seq-mask-tis"),
        "rloo": RlooConfig(),
        "rloo, a ratio per row": RlooConfig(ratio_level="sequence"),
    }
    return {name: PolicyLoss(build_algorithm(config), 1, "column", None) for name, config in configs.items()}
