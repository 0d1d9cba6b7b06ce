"""The same bits for a row, whatever is computed beside it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from spmdrl.engines.models.kernels import invariant, plain
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.nouns.batch import offsets_of


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_library(monkeypatch):
    monkeypatch.setattr(invariant, "library_for", lambda *tensors: None)


def heads_of(length: int, *, kv_heads: int = 2, head_size: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (4, head_size), (kv_heads, head_size), (kv_heads, head_size)
    return [torch.randn(length, *size, generator=generator) for size in sizes]


LENGTHS = [1, 3, 16, 17, 33, 63, 65, 97, 128, 129, 130, 191, 193, 200, 257, 300, 386, 513, 770]


def whole_attention(rows: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [invariant.packed_attention(*row, PackedRows(offsets_of([len(row[0])]))) for row in rows]


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize(("kv_heads", "head_size"), [(4, 8), (2, 16), (1, 64), (2, 24), (4, 6)])
def test_a_query_has_the_bits_of_its_whole_row_alone_and_beside_others(kv_heads, head_size):
    rows = [heads_of(length, kv_heads=kv_heads, head_size=head_size, seed=length) for length in LENGTHS]
    whole = whole_attention(rows)
    packed = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    assert torch.equal(torch.cat(whole), invariant.packed_attention(*packed, PackedRows(offsets_of(LENGTHS))))
    # As in decoding: the last query of a row, beside another, over keys with zeros or another row's leftovers behind.
    for (length, row, expected), filler in itertools.product(zip(LENGTHS, rows, whole, strict=True), (0.0, 3.0)):
        width = invariant.key_width(length)
        q, k, v = (torch.stack([heads, heads.flip(0)]).transpose(1, 2) for heads in row)
        k, v = (F.pad(heads, (0, 0, 0, width - length), value=filler) for heads in (k, v))
        bias = torch.zeros(width).masked_fill(torch.arange(width) >= length, -torch.inf)[None, None, None]
        # Query heads that share a key head come as its queries.
        decoded = invariant.masked_attention(q[:, :, -1].unflatten(1, (kv_heads, -1)), k, v, bias)
        assert torch.equal(decoded[0].flatten(0, 1), expected[-1]), length


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("tile", [1, 16, 32, 64])
def test_a_row_cut_in_tiles_has_the_bits_of_the_whole(tile):
    length = 330
    q, k, v = heads_of(length)
    (whole,) = whole_attention([[q, k, v]])
    for start in range(0, length, tile):
        stop = min(start + tile, length)
        keys, values = (heads[:stop].transpose(0, 1)[None] for heads in (k, v))
        mask = torch.arange(stop) <= torch.arange(start, stop)[:, None]
        part = invariant.masked_attention(q[start:stop].transpose(0, 1)[None], keys, values, mask)
        assert torch.equal(part[0].transpose(0, 1), whole[start:stop]), start


def test_widths_of_keys_are_those_of_decoding_and_grow_with_the_position():
    widths = [invariant.key_width(length) for length in range(1, 1025)]
    assert sorted(set(widths)) == [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert widths == sorted(widths) and all(width >= length for length, width in enumerate(widths, start=1))


def test_attention_and_its_gradient_are_those_of_torch():
    lengths = [5, 70, 1, 330]
    packed = [torch.cat(parts) for parts in zip(*(heads_of(length, seed=length) for length in lengths), strict=True)]
    results = []
    for attention in (invariant.packed_attention, plain.packed_attention):
        inputs = [heads.clone().requires_grad_() for heads in packed]
        out = attention(*inputs, PackedRows(offsets_of(lengths)))
        out.square().sum().backward()
        results.append([out.detach(), *(heads.grad for heads in inputs)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [4, 13, 86, 128])
def test_gates_have_the_same_bits_in_any_batch(width):
    gate, up = torch.randn(2, 300, width, generator=torch.Generator().manual_seed(1)) * 4
    beside_each_other = torch.cat((gate, up), 1).split(width, 1)
    assert torch.equal(invariant.swiglu(*beside_each_other), invariant.swiglu(gate, up))
    whole, sigmoid = invariant.swiglu(gate, up), invariant.sigmoid(gate)
    for start, stop in ((0, 1), (3, 5), (7, 60), (290, 300)):
        part = slice(start, stop)
        assert torch.equal(invariant.swiglu(gate[part].clone(), up[part].clone()), whole[part])
        assert torch.equal(invariant.sigmoid(gate[part].clone()), sigmoid[part])
    torch.testing.assert_close(whole, plain.swiglu(gate, up), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sigmoid, gate.sigmoid(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inputs", [8, 32, 64, 100])
@pytest.mark.parametrize("outputs", [13, 32, 86, 512])
def test_linear_layers_have_the_same_bits_for_any_number_of_rows(inputs, outputs):
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(400, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    whole = invariant.linear(x, weight)
    for num_rows, start in itertools.product((1, 2, 3, 4, 5, 9, 33, 256), (0, 3)):
        part = slice(start, start + num_rows)
        assert torch.equal(invariant.linear(x[part].clone(), weight), whole[part]), (num_rows, start)
    assert invariant.linear(x[:0], weight).shape == (0, outputs)


@pytest.mark.parametrize("outputs", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("inputs", [1, 7, 50, 66, 129])
def test_products_with_few_columns_have_the_same_bits_wherever_a_row_lies(inputs, outputs):
    """As of an adapter's A, by a row's place in memory, beside other rows and beside other columns."""
    generator = torch.Generator().manual_seed(inputs * outputs)
    x, weight = torch.randn(61, inputs, generator=generator), torch.randn(40, inputs, generator=generator)
    whole = invariant.linear(x, weight[:outputs])
    assert torch.equal(invariant.linear(x, weight)[:, :outputs], whole)
    for row in range(61):
        alone = x[row : row + 1]
        assert torch.equal(invariant.linear(alone, weight[:outputs]), whole[row : row + 1])
        assert torch.equal(invariant.linear(alone.clone(), weight[:outputs]), whole[row : row + 1])
    torch.testing.assert_close(whole, F.linear(x, weight[:outputs]))
    bias = torch.randn(outputs, generator=generator)
    torch.testing.assert_close(invariant.linear(x, weight[:outputs], bias), F.linear(x, weight[:outputs], bias))


def test_experts_give_a_token_the_same_bits_whoever_else_comes():
    generator = torch.Generator().manual_seed(3)
    x, weights = torch.randn(60, 32, generator=generator), torch.randn(4, 24, 32, generator=generator)
    whole = invariant.grouped_linear(x, weights, torch.tensor([20, 0, 39, 1]))
    alone = invariant.grouped_linear(x[[5, 25]], weights, torch.tensor([1, 0, 1, 0]))
    assert torch.equal(alone, whole[[5, 25]])


def test_gates_whose_exp_would_overflow_have_values_and_gradients_as_in_float64():
    gate = torch.tensor([-1e30, -1e4, -200.0, -89.0, -50.0, 0.0, 50.0, 200.0, 1e30], requires_grad=True)
    for gated in (lambda x: invariant.swiglu(x, torch.full_like(x, 2.0)), invariant.sigmoid):
        (gradient,) = torch.autograd.grad(gated(gate).sum(), gate)
        wide = gate.detach().double().clamp(-700).requires_grad_()
        (expected,) = torch.autograd.grad(gated(wide).sum(), wide)
        torch.testing.assert_close(gated(gate).double(), gated(wide), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=1e-5)
