from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.engines.models.decoder import DecoderConfig, row_cost_of
from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.engines.training.microbatch import fewest_microbatches, plan_microbatches
from spmdrl.engines.training.packed_rows import TokenRows, dummy_rows, to_microbatch
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.partition import RowCost
from spmdrl.nouns.settings.model_sizes import LatentConfig, MoeConfig, WindowConfig
from tests.engines.training.tiny import CONFIG, make_rows

COST = RowCost(per_token=10, per_token_squared=1)
# Of a model with about 4096 channels: a token's weights cost as much as its attention over 100,000 others.
COST_OF_LARGE_MODEL = RowCost(per_token=100_000, per_token_squared=1)
LENGTHS = st.lists(st.integers(2, 40), max_size=30)


def costs(lengths: list[int], cost: RowCost = COST) -> list[int]:
    return [cost.of(length) for length in lengths]


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 100), st.integers(0, 5))
def test_every_row_runs_once_within_the_budget_in_the_agreed_count(lengths, max_tokens, extra):
    plan = plan_microbatches(lengths, costs(lengths), max_tokens=max_tokens, agree=lambda count: count + extra)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) <= 1 or sum(lengths[row] for row in rows) <= max_tokens
    assert len(plan) == len(fewest_microbatches(lengths, costs(lengths), max_tokens=max_tokens)) + extra
    found = [sum(COST.of(lengths[row]) for row in rows) for rows in plan]
    assert found == sorted(found, reverse=True)


def test_equal_rows_are_balanced_exactly():
    plan = plan_microbatches([8] * 12, [1] * 12, max_tokens=32, agree=lambda count: count)
    assert [len(rows) for rows in plan] == [4, 4, 4]


def test_long_rows_weigh_more_than_their_tokens():
    lengths = [30] + [10] * 4
    plan = plan_microbatches(lengths, costs(lengths), max_tokens=60, agree=lambda count: count)
    assert plan == [[0], [1, 2, 3, 4]]


def log_normal_lengths(seed: int, num_rows: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(mean=5.5, sigma=0.8, size=num_rows)
    return [max(2, min(3000, int(length))) for length in drawn]


@pytest.mark.parametrize("seed", range(8))
def test_microbatches_of_long_tailed_rows_hold_about_the_same_work_and_tokens(seed):
    lengths = log_normal_lengths(seed, num_rows=256)
    row_costs = costs(lengths, COST_OF_LARGE_MODEL)
    plan = plan_microbatches(lengths, row_costs, max_tokens=16384, agree=lambda count: count)
    tokens = [sum(lengths[row] for row in rows) for rows in plan]
    found = [sum(row_costs[row] for row in rows) for rows in plan]
    assert len(plan) == -(-sum(lengths) // 16384)
    assert max(tokens) / min(tokens) < 1.05
    assert max(found) / min(found) < 1.05


def test_rows_that_fill_the_budget_are_alone_and_leave_the_rest_balanced():
    lengths = [70, 50, 20, 20, 20, 20]
    plan = plan_microbatches(lengths, costs(lengths), max_tokens=50, agree=lambda count: count)
    assert plan == [[0], [1], [2, 5], [3, 4]]


def test_a_budget_that_balance_would_break_is_kept():
    # Equal costs would put all the short rows together, 24 tokens.
    lengths = [15, *[2] * 12]
    plan = plan_microbatches(lengths, costs(lengths, RowCost(0, 1)), max_tokens=20, agree=lambda count: count)
    assert sorted(sum(lengths[row] for row in rows) for rows in plan) == [19, 20]


def test_the_cost_of_a_model_counts_its_weights_and_its_attention():
    cost = row_cost_of(CONFIG)
    assert cost.per_token_squared == 2 * 2 * 4 * 4
    assert cost.per_token == 2 * (2 * (8 * 4 * 2 * (4 + 2) + 3 * 8 * 13) + 17 * 8)


def test_within_a_window_the_cost_of_attention_grows_with_the_tokens_alone():
    full, windowed = row_cost_of(CONFIG), row_cost_of(replace(CONFIG, window=WindowConfig(5, layers=(1,))))
    assert 2 * windowed.per_token_squared == full.per_token_squared
    # Products with 5 keys and 5 values of each of 4 heads.
    assert windowed.per_token == full.per_token + 2 * 4 * (5 * 4 + 5 * 4)


def weights_that_a_token_meets(config: DecoderConfig) -> int:
    """Elements of all matrices but the embedding, and of experts only the share of the chosen ones."""
    total = 0
    for name, shape in parameter_shapes(config).items():
        if len(shape) < 2 or "embed_tokens" in name:
            continue
        share = config.moe.experts_per_token / config.moe.num_experts if ".experts." in name else 1
        total += math.prod(shape) * share
    return round(total)


@pytest.mark.parametrize("query_rank", [None, 6])
def test_the_cost_of_a_sparse_latent_model_counts_what_a_token_meets(query_rank):
    latent = LatentConfig(query_rank=query_rank, key_value_rank=5, plain_size=4, rotary_size=2, value_size=3)
    moe = MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=7, num_shared_experts=1, dense_layers=(0,))
    config = replace(
        CONFIG,
        model_type="deepseek_v3",
        num_layers=3,
        num_kv_heads=4,
        head_size=6,
        qk_norm=False,
        moe=moe,
        latent=latent,
    )
    cost = row_cost_of(config)
    assert cost.per_token == 2 * weights_that_a_token_meets(config)
    assert cost.per_token_squared == 3 * 4 * (6 + 3)


def test_a_microbatch_points_at_the_tokens_before_each_response_token(device):
    rows = TokenRows(torch.arange(10, 17), offsets_of([4, 3]), torch.tensor([2, 1]))
    micro = to_microbatch(rows, [0, 1], device, "logprobs")
    assert micro.targets_P.tolist() == [12, 13, 15, 16]
    assert micro.places_P.tolist() == [1, 2, 4, 5]
    assert micro.row_of_response_R.tolist() == [0, 0, 1, 1]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_selected_rows_carry_their_columns_and_know_where_they_came_from():
    rows = make_rows(5)
    picked = rows.select([3, 1])
    assert picked.response["row"].unique_consecutive().tolist() == [3, 1]
    torch.testing.assert_close(picked.response["weights"], rows.response["weights"][rows.response_index([3, 1])])
    bounds = rows.offsets.tolist()
    assert picked.tokens_T.tolist() == rows.tokens_T[bounds[3] : bounds[4]].tolist() + (
        rows.tokens_T[bounds[1] : bounds[2]].tolist()
    )


def test_a_row_without_a_prompt_is_refused_by_name():
    with pytest.raises(ValueError, match="row 1 has a prompt of 0 tokens in 3"):
        TokenRows(torch.zeros(5, dtype=torch.int64), offsets_of([2, 3]), torch.tensor([1, 0]))


def test_a_column_of_another_size_is_refused_by_name():
    with pytest.raises(ValueError, match="'weights' holds 3 values, but these rows need 2"):
        TokenRows(torch.zeros(3).long(), offsets_of([3]), torch.tensor([1]), response={"weights": torch.ones(3)})


def test_the_dummy_has_one_response_token():
    assert dummy_rows().num_response_tokens == 1
