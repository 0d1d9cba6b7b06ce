"""Advantages against their equations in numpy: one function per equation, from a whole batch of ragged rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.random_rows import Rows, per_token

from spmdrl.algorithms.policy.cispo import CispoConfig
from spmdrl.algorithms.policy.dppo import DppoConfig
from spmdrl.algorithms.policy.dr_grpo import DrGrpoConfig
from spmdrl.algorithms.policy.grpo import GrpoConfig
from spmdrl.algorithms.policy.gspo import GspoConfig
from spmdrl.algorithms.policy.reinforce_pp import ReinforcePpBaselineConfig, ReinforcePpConfig
from spmdrl.algorithms.policy.rloo import RlooConfig
from spmdrl.algorithms.policy.sapo import SapoConfig
from spmdrl.algorithms.table import build_algorithm

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=10)


def tokens(rows: Rows, values: list[float]) -> np.ndarray:
    return np.repeat(values, rows.lengths)


def group_relative(rows: Rows, config) -> np.ndarray:
    """(R - mean) / (std + epsilon)."""
    out = []
    for row, reward in enumerate(rows.rewards):
        group = rows.rewards[rows.members(row)]
        compared = rows.rewards if config.scale_rewards == "batch" else group
        ddof = int(config.std == "unbiased" and len(compared) > 1)
        scale = 1.0 if config.scale_rewards == "none" else compared.std(ddof=ddof) + config.std_epsilon
        out.append(0.0 if len(group) == 1 else (reward - group.mean()) / scale)
    return tokens(rows, out)


def leave_one_out(rows: Rows, config) -> np.ndarray:
    """R_i - mean of the others' R_j."""
    out = []
    for row, reward in enumerate(rows.rewards):
        others = [rows.rewards[other] for other in rows.members(row) if other != row]
        out.append(reward - np.mean(others) if others else 0.0)
    return tokens(rows, out)


def returns_whitened(rows: Rows, config) -> np.ndarray:
    """R - beta sum over later tokens of k1, less the mean over all tokens, over their standard deviation."""
    out = []
    for row, reward in enumerate(rows.rewards):
        kl = rows.kl(row)
        out += [reward - config.kl_coef * kl[place:].sum() for place in range(kl.size)]
    return whitened(np.asarray(out), config)


def baseline_whitened(rows: Rows, config) -> np.ndarray:
    """R - mean of the group, over the standard deviation of the batch."""
    centred = [reward - rows.rewards[rows.members(row)].mean() for row, reward in enumerate(rows.rewards)]
    if config.whiten_over == "tokens":
        return whitened(tokens(rows, centred), config)
    return tokens(rows, whitened(np.asarray(centred), config))


def whitened(values: np.ndarray, config) -> np.ndarray:
    ddof = int(config.std == "unbiased" and values.size > 1)
    deviation = values.std(ddof=ddof) if values.size > 1 else 0.0
    return (values - values.mean()) / (deviation + 1e-8)


CASES = [
    (GrpoConfig(), group_relative),
    (GrpoConfig(std="biased", std_epsilon=1e-6), group_relative),
    (GrpoConfig(scale_rewards="batch"), group_relative),
    (DrGrpoConfig(), group_relative),
    (GspoConfig(), group_relative),
    (CispoConfig(), group_relative),
    (SapoConfig(), group_relative),
    (DppoConfig(), group_relative),
    (RlooConfig(), leave_one_out),
    (ReinforcePpConfig(kl_coef=0.3), returns_whitened),
    (ReinforcePpConfig(std="biased"), returns_whitened),
    (ReinforcePpBaselineConfig(), baseline_whitened),
    (ReinforcePpBaselineConfig(whiten_over="tokens"), baseline_whitened),
]


@pytest.mark.parametrize(("config", "equation"), CASES)
@given(LENGTHS, st.integers(0, 999))
@settings(max_examples=30)
def test_advantages_are_those_of_the_equations(config, equation, lengths, seed):
    rows = Rows.drawn(lengths, seed)
    inputs = rows.inputs()
    found = per_token(build_algorithm(config).advantages(inputs), inputs)
    # Of a single value the deviation is 0, and what rounding leaves of it is divided by 1e-8.
    np.testing.assert_allclose(found, equation(rows, config), rtol=1e-12, atol=1e-12 if len(lengths) > 1 else 1e-7)
