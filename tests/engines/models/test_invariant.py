"""The same bits for a row, whatever is computed beside it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from spmdrl.engines.models.kernels import invariant, plain


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [4, 13, 86, 128])
def test_gates_and_softcaps_have_the_same_bits_in_any_batch(width):
    gate, up = torch.randn(2, 300, width, generator=torch.Generator().manual_seed(1)) * 4
    beside_each_other = torch.cat((gate, up), 1).split(width, 1)
    assert torch.equal(invariant.swiglu(*beside_each_other), invariant.swiglu(gate, up))
    gelu, capped = invariant.geglu(gate, up), invariant.softcap(10 * gate, 5.0)
    whole, sigmoid, softplus = invariant.swiglu(gate, up), invariant.sigmoid(gate), invariant.softplus(gate)
    for start, stop in ((0, 1), (3, 5), (7, 60), (290, 300)):
        part = slice(start, stop)
        assert torch.equal(invariant.swiglu(gate[part].clone(), up[part].clone()), whole[part])
        assert torch.equal(invariant.geglu(gate[part].clone(), up[part].clone()), gelu[part])
        assert torch.equal(invariant.softcap(10 * gate[part], 5.0), capped[part])
        assert torch.equal(invariant.sigmoid(gate[part].clone()), sigmoid[part])
        assert torch.equal(invariant.softplus(gate[part].clone()), softplus[part])
    torch.testing.assert_close(whole, plain.swiglu(gate, up), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gelu, F.gelu(gate, approximate="tanh") * up, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(capped, 5 * (2 * gate).tanh(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sigmoid, gate.sigmoid(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(softplus, F.softplus(gate), rtol=1e-6, atol=1e-6)


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
