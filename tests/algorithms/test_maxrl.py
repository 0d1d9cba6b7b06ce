"""MaxRL's advantages against numpy in float64."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.algorithms.policy.maxrl import MaxRl
from spmdrl.algorithms.settings.policy_configs import MaxRlConfig


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=24))
def test_advantages_are_relative_to_the_mean_and_none_where_nothing_is_right(rewards):
    rewards, groups = np.asarray(rewards), np.arange(len(rewards)) // 4
    expected = np.zeros(len(rewards))
    for group in np.unique(groups):
        of_group = rewards[groups == group]
        if of_group.mean() > 0:
            expected[groups == group] = of_group / of_group.mean() - 1
    got = MaxRl(MaxRlConfig()).row_advantages(torch.tensor(rewards), torch.tensor(groups))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)
