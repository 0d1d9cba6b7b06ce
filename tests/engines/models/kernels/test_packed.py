from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.engines.models.kernels.packed import PackedRows, group_rows, padded_attention, plan_blocks
from spmdrl.nouns.batch import offsets_of

lengths_of_rows = st.lists(st.integers(0, 400), max_size=40)


@given(lengths_of_rows)
def test_every_row_with_tokens_is_in_exactly_one_group(lengths: list[int]) -> None:
    grouped = sorted(row for group in group_rows(lengths) for row in group)
    assert grouped == [row for row, length in enumerate(lengths) if length]


@given(lengths_of_rows)
def test_rows_of_a_group_have_similar_lengths(lengths: list[int]) -> None:
    for group in group_rows(lengths):
        longest, shortest = max(lengths[row] for row in group), min(lengths[row] for row in group)
        assert longest - shortest <= max(16, longest // 16)


@given(lengths_of_rows)
def test_every_token_has_one_slot_and_comes_back_from_it(lengths: list[int]) -> None:
    plan = plan_blocks(offsets_of(lengths).tolist())
    num_tokens = sum(lengths)
    assert torch.equal(plan.token_of_slot[plan.slot_of_token], torch.arange(num_tokens))
    assert len(plan.token_of_slot) == num_tokens + len(plan.padded_slots)
    assert not set(plan.slot_of_token.tolist()) & set(plan.padded_slots.tolist())


@pytest.mark.parametrize("lengths", [[5, 5], [3, 80, 7]])
def test_no_gradient_is_put_in_a_tensor_of_zeros(lengths: list[int]) -> None:
    heads = [torch.randn(sum(lengths), 2, 4, requires_grad=True) for _ in range(3)]
    out = padded_attention(*heads, PackedRows(offsets_of(lengths)))
    operations, waiting = set[str](), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        operations.add(node.name())
        waiting += [below for below, _ in node.next_functions if below is not None]
    assert any("Attention" in name for name in operations)
    assert "SliceBackward0" not in operations
