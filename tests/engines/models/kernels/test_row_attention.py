"""The CPU library's attention inside rows: right, alike for a row whatever is beside it, and done without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.cpp import cpu_library as library
from spmdrl.engines.models.kernels.cpp import row_attention
from spmdrl.engines.models.kernels.packed import PackedRows, padded_attention
from spmdrl.engines.models.kernels.prefixed import PrefixedRows, padded_prefixed_attention
from spmdrl.nouns.batch import offsets_of
from tests.engines.models.support import no_cpu_library

pytestmark = pytest.mark.cpu_only(reason="the library is the CPU's")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# Query heads, key heads, head sizes of keys and values: those that fill whole vectors, and others.
SIZES = [(4, 2, 64, 64), (2, 2, 32, 32), (6, 2, 128, 128), (4, 1, 24, 16), (3, 3, 5, 3), (2, 1, 96, 40)]


@pytest.fixture(autouse=True)
def has_library() -> None:
    if library.cpu_library() is None:
        pytest.skip("this machine has no C++ compiler")


def inputs_of(num_tokens: int, sizes: tuple[int, int, int, int], seed: int = 0) -> list[Tensor]:
    num_heads, num_kv_heads, key_size, value_size = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_heads, key_size), (num_kv_heads, key_size), (num_kv_heads, value_size)]
    return [torch.randn(num_tokens, *shape, generator=generator) for shape in shapes]


def in_double(lengths: Sequence[int]) -> Attention:
    """PyTorch's attention of each row by itself, in float64."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for start, stop in pairwise(offsets_of(lengths).tolist()):
            heads = [x[start:stop].transpose(0, 1).double() for x in (q, k, v)]
            shared = [x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in heads[1:]]
            out = torch.nn.functional.scaled_dot_product_attention(heads[0], *shared, is_causal=True)
            rows.append(out.transpose(0, 1))
        return torch.cat(rows)

    return attend


def packed(lengths: Sequence[int]) -> Attention:
    return lambda q, k, v: ops.packed_attention(q, k, v, PackedRows(offsets_of(lengths)))


def with_gradients(attend: Attention, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach().float(), *torch.autograd.grad((out * weight).sum(), leaves)]


def assert_right(lengths: Sequence[int], sizes: tuple[int, int, int, int], seed: int = 0) -> None:
    inputs = inputs_of(sum(lengths), sizes, seed)
    found, expected = (with_gradients(attend(lengths), inputs) for attend in (packed, in_double))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=2e-6 * float(other.abs().max()) + 4e-6)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("lengths", [[1], [7, 1, 84, 30, 129], [16, 32, 64], [333]])
def test_values_and_gradients_are_those_of_each_row_in_double(lengths, sizes):
    assert_right(lengths, sizes)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.sampled_from(SIZES), st.integers(0, 2**32 - 1))
def test_random_rows_are_right(lengths, sizes, seed):
    assert_right(lengths, sizes, seed)


def test_scores_far_apart_neither_overflow_nor_vanish():
    q, k, v = inputs_of(50, (2, 1, 16, 16))
    out = packed([50])(q * 100, k * 100, v)
    torch.testing.assert_close(out, in_double([50])(q * 100, k * 100, v).float(), rtol=1e-4, atol=1e-4)
    assert packed([50])(torch.zeros_like(q), k, v)[49].isclose(v.mean(0), atol=1e-6).all()


def test_inputs_may_be_parts_of_wider_tensors_and_gradients_of_one_number():
    wide = torch.randn(40, 8, 16, generator=torch.Generator().manual_seed(0))
    pieces, whole = [wide[:, :4], wide[:, 4:6], wide[:, 6:]], [x.contiguous() for x in wide.split([4, 2, 2], 1)]
    results = []
    for inputs in (pieces, whole):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = packed([13, 27])(*leaves)
        # An expanded gradient, every number of which is in the same place.
        results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    assert all(map(torch.equal, *results))
    every_other = torch.randn(40, 2, 32)[..., ::2]
    assert packed([40])(every_other, every_other, every_other).equal(packed([40])(*[every_other.contiguous()] * 3))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_whatever_is_beside_it(threads):
    lengths, before = [7, 130, 1, 64, 30], torch.get_num_threads()
    inputs = inputs_of(sum(lengths), (4, 2, 32, 32))
    together = with_gradients(packed(lengths), inputs)
    torch.set_num_threads(threads)
    try:
        for start, stop in pairwise(offsets_of(lengths).tolist()):
            leaves = [x[start:stop].clone().requires_grad_() for x in inputs]
            out = packed([stop - start])(*leaves)
            weight = torch.randn(together[0].shape, generator=torch.Generator().manual_seed(1))[start:stop]
            alone = [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
            assert all(one.equal(all_of[start:stop]) for one, all_of in zip(alone, together, strict=True))
    finally:
        torch.set_num_threads(before)


def test_a_token_s_result_has_no_bit_of_what_comes_after_it():
    inputs = inputs_of(70, (4, 2, 32, 32))
    whole = packed([70])(*inputs)
    for length in (1, 5, 6, 17, 48, 69):
        assert packed([length])(*(x[:length] for x in inputs)).equal(whole[:length])


def test_threads_share_rows_behind_one_prefix_without_a_race():
    rows = PrefixedRows(offsets_of([20, 0, 9]), [5, 30, 7, 11], [0, 0, 0, 2])
    inputs = inputs_of(82, (4, 2, 32, 32))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append(with_gradients(lambda q, k, v: ops.prefixed_attention(q, k, v, rows), inputs))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))
    for one, other in zip(
        found[0], with_gradients(lambda q, k, v: padded_prefixed_attention(q, k, v, rows), inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes, block_size", [((4, 2, 32, 32), 32), ((2, 1, 24, 16), 5), ((8, 2, 64, 64), 16)])
def test_cached_positions_have_the_bits_of_whole_rows(sizes, block_size):
    lengths, generator = (150, 7, 33), torch.Generator().manual_seed(0)
    num_blocks = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(num_blocks), generator=generator)
    _, num_kv_heads, key_size, value_size = sizes
    # What no row holds is whatever was there before.
    keys, values = (torch.full((len(order), num_kv_heads, block_size, size), 7e37) for size in (key_size, value_size))
    queries, whole, tables = [], [], []
    for seed, (length, table) in enumerate(zip(lengths, order.split(num_blocks), strict=True)):
        q, k, v = inputs_of(length, sizes, seed)
        for store, heads in ((keys, k), (values, v)):
            for s in range(length):
                store[table[s // block_size], :, s % block_size] = heads[s]
        queries.append(q)
        whole.append(packed([length])(q, k, v))
        tables.append(torch.nn.functional.pad(table, (0, max(num_blocks) - len(table))).int())
    # All positions of each row beside each other, as a prompt comes; then one of each row, as in decoding.
    of_rows = torch.cat([table.expand(length, -1) for table, length in zip(tables, lengths, strict=True)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    attend = row_attention.cached_attention
    found = attend(torch.cat(queries), keys, values, of_rows, (positions + 1).int())
    assert found.equal(torch.cat(whole))
    for place in (0, 5, 32, 149):
        there = [number for number, length in enumerate(lengths) if place < length]
        decoded = attend(
            torch.stack([queries[number][place] for number in there]), keys, values,
            torch.stack([tables[number] for number in there]), torch.full((len(there),), place + 1).int(),
        )  # fmt: skip
        assert decoded.equal(torch.stack([whole[number][place] for number in there]))


def test_other_dtypes_and_machines_without_a_compiler_have_pytorch_s_bits():
    rows, prefixed = PackedRows(offsets_of([9, 21])), PrefixedRows(offsets_of([10]), [7, 13], [0, 0])

    def agree(dtype: torch.dtype) -> None:
        inputs = [x.to(dtype) for x in inputs_of(30, (4, 2, 16, 16))]
        assert ops.packed_attention(*inputs, rows).equal(padded_attention(*inputs, rows))
        assert ops.prefixed_attention(*inputs, prefixed).equal(padded_prefixed_attention(*inputs, prefixed))

    agree(torch.float16)
    with no_cpu_library():
        agree(torch.float32)
        agree(torch.bfloat16)


def test_bfloat16_is_attended_to_in_float32_and_rounded_once() -> None:
    inputs = [x.to(torch.bfloat16).requires_grad_() for x in inputs_of(30, (4, 2, 16, 16))]
    widened = [x.detach().float().requires_grad_() for x in inputs]
    for rows in (PackedRows(offsets_of([9, 21])), PrefixedRows(offsets_of([10]), [7, 13], [0, 0])):
        attend = ops.packed_attention if isinstance(rows, PackedRows) else ops.prefixed_attention
        out, exact = attend(*inputs, rows), attend(*widened, rows)
        assert out.dtype == torch.bfloat16 and out.equal(exact.to(torch.bfloat16))
        pulls = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
        gradients = torch.autograd.grad((out * pulls).sum(), inputs)
        of_exact = torch.autograd.grad((exact * pulls.float()).sum(), widened)
        for gradient, whole in zip(gradients, of_exact, strict=True):
            assert gradient.equal(whole.to(torch.bfloat16))
