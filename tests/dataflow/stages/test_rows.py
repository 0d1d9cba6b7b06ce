import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.training.tiny import CONFIG

from spmdrl.dataflow.stages.advantage import share_without_signal
from spmdrl.dataflow.stages.rollout.partial import seeds_of_group
from spmdrl.dataflow.stages.rollout.requests import row_seed
from spmdrl.dataflow.stages.rows import token_rows
from spmdrl.nouns.batch import Batch

RUNS = st.lists(st.integers(0, 99), min_size=1, max_size=6)


@given(st.lists(st.tuples(RUNS, RUNS), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_token_rows_hold_prompt_then_response_of_each_row(pairs):
    batch = Batch.of_rows(range(len(pairs)))
    batch.put_lists("prompt_ids", [prompt for prompt, _ in pairs], torch.int32)
    batch.put_lists("response_ids", [response for _, response in pairs], torch.int32)
    batch.put_lists("advantages", [[0.5] * len(response) for _, response in pairs], torch.float32)
    rows = token_rows(batch, CONFIG, ["advantages"])
    assert rows.tokens_T.dtype == torch.int64, "what engines index with"
    bounds = rows.offsets.tolist()
    got = [rows.tokens_T[a:b].tolist() for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert got == [prompt + response for prompt, response in pairs]
    assert rows.prompt_lengths_B.tolist() == [len(prompt) for prompt, _ in pairs]
    assert rows.response["advantages"].numel() == rows.num_response_tokens


def test_groups_whose_usable_rewards_are_equal_carry_no_signal():
    nan = float("nan")
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, nan, 0.5, nan, nan])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert share_without_signal(rewards, groups) == 0.75


def test_seeds_differ_between_rows_steps_and_runs_and_fit_63_bits():
    seeds = {row_seed(seed, step, row) for seed in range(3) for step in range(5) for row in range(20)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(1, 2, 3) == row_seed(1, 2, 3)


def test_a_group_has_the_seeds_of_the_step_that_would_train_it_at_once():
    """Serial 13 of steps of 5 prompts is the fourth prompt of step 3."""
    assert seeds_of_group(7, 13, num_wanted=5, size=2) == (row_seed(7, 3, 6), row_seed(7, 3, 7))
