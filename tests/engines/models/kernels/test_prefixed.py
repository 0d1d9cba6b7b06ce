"""Attention behind shared prefixes gives what attention of whole rows gives, and its gradients."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.models.kernels.cpp import row_attention
from spmdrl.engines.models.kernels.packed import PackedRows, padded_attention
from spmdrl.engines.models.kernels.prefixed import Copies, PrefixedRows, copy_rows, padded_prefixed_attention
from spmdrl.nouns.batch import offsets_of

# Prompts of two tokens to four blocks of the exact mode's keys, some of a length, and a row without company; rows of
# one token and more.
FIRST = [2, 70, 33, 70, 200]
FOLLOWERS = [(0, 1), (0, 40), (1, 3), (1, 66), (1, 5), (3, 5), (3, 5), (4, 12), (4, 130)]


def prefixed() -> PrefixedRows:
    pieces, lengths = zip(*FOLLOWERS, strict=True)
    return PrefixedRows(offsets_of(FIRST), lengths, pieces)


def heads(value_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    num_tokens = sum(FIRST) + sum(length for _, length in FOLLOWERS)
    shapes = ((4, 16), (2, 16), (2, value_size))
    return [torch.randn(num_tokens, *shape).requires_grad_() for shape in shapes]


def row_by_row(q: Tensor, k: Tensor, v: Tensor, attend=plain.packed_attention) -> Tensor:
    """Each row by itself; what a prefix attends to is the same in each of its rows."""
    starts, begin = offsets_of(FIRST).tolist(), sum(FIRST)
    rows = [(torch.arange(*bounds), 0) for bounds in pairwise(starts)]
    for piece, length in FOLLOWERS:
        own = torch.arange(begin, begin + length)
        rows.append((torch.cat((rows[piece][0], own)), FIRST[piece]))
        begin += length
    found = [attend(q[row], k[row], v[row], PackedRows(offsets_of([len(row)])))[skip:] for row, skip in rows]
    return torch.cat(found)


@pytest.mark.parametrize("attend", [ops.prefixed_attention, padded_prefixed_attention])
@pytest.mark.parametrize("value_size", [16, 8])
def test_rows_behind_prefixes_attend_as_whole_rows_do(value_size, attend):
    inputs = heads(value_size)
    out, expected = attend(*inputs, prefixed()), row_by_row(*inputs)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    for found, wanted in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_on_a_cpu_they_have_the_bits_of_rows_by_themselves():
    inputs = [values.detach() for values in heads(16)]
    found = row_attention.prefixed_attention(*inputs, prefixed())
    assert torch.equal(found, row_by_row(*inputs, attend=row_attention.packed_attention))


@pytest.mark.parametrize("module", [row_attention, None])
def test_on_a_cpu_they_have_the_bits_of_whole_rows_that_share_nothing(module):
    of_prefixed, of_rows = padded_prefixed_attention, padded_attention
    if module is not None:
        of_prefixed, of_rows = module.prefixed_attention, module.packed_attention
    inputs, rows = [values.detach() for values in heads(16)], prefixed()
    whole = rows.whole_rows()
    tokens, offsets = torch.cat(whole), offsets_of([len(row) for row in whole])
    expected = of_rows(*(values[tokens] for values in inputs), PackedRows(offsets))
    # A prefix has the bits that it has in the first of its rows.
    first = [tokens.tolist().index(token) for token in range(len(inputs[0]))]
    assert torch.equal(of_prefixed(*inputs, rows), expected[first])


def test_keys_without_padding_are_those_of_each_row_in_turn():
    rows = prefixed()
    packed = rows.packed(torch.device("cpu"))
    for row, (start, stop) in zip(rows.followers(), pairwise(packed.rows.offsets), strict=True):
        assert torch.equal(packed.keys.index[start:stop], row)
    assert packed.ends.diff().tolist() == [length for _, length in FOLLOWERS]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_gradients_of_copies_are_added_in_the_order_of_their_slots(index, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(7, 3, generator=generator, requires_grad=True)
    by_copy = torch.randn(len(index), 3, generator=generator)
    copies = copy_rows(values, Copies.of(torch.tensor(index)))
    assert torch.equal(copies, values[index])
    copies.backward(by_copy)
    expected = np.zeros((7, 3), dtype=np.float32)
    for row, gradient in zip(index, by_copy.numpy(), strict=True):
        expected[row] += gradient
    assert np.array_equal(values.grad.numpy(), expected)
