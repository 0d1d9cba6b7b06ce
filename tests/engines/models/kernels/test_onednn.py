"""Products by oneDNN: right, with right gradients, and alike for a row whatever is beside it; blocks are reversible."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from spmdrl.engines.models.kernels import cpu, ops
from spmdrl.engines.models.kernels.cpu import BlockedLinear, blocked_linear_takes

SIZES = [(97, 33), (192, 64), (48, 160), (1, 8), (640, 1100)]


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product_in_float64(num_out, num_in, dtype) -> None:
    torch.manual_seed(0)
    weight, bias, rows = (torch.randn(shape).to(dtype) for shape in ((num_out, num_in), (num_out,), (9, 2 * num_in)))
    if not blocked_linear_takes(weight):
        pytest.skip(f"no such product of {dtype} here")
    # Every other column, as part of a wider tensor.
    rows = rows[:, :num_in]
    found = BlockedLinear(weight, bias)(rows)
    expected = rows.double() @ weight.double().T + bias.double()
    scale = rows.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() / scale).max() < (1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_a_row_has_the_same_bits_whatever_is_beside_it(num_out, num_in) -> None:
    torch.manual_seed(0)
    linear = BlockedLinear(torch.randn(num_out, num_in), None)
    rows = torch.randn(300, num_in)
    together = linear(rows)
    for num_rows in (1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 64, 129):
        assert linear(rows[-num_rows:]).equal(together[-num_rows:]), num_rows


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_the_weight_comes_back_as_it_was(num_out, num_in) -> None:
    weight = torch.randn(num_out, num_in)
    linear = BlockedLinear(weight, None)
    kept = weight.clone()
    weight.zero_()
    assert linear.weight().equal(kept) and linear.num_bytes >= kept.nbytes


def test_no_rows_and_other_dtypes() -> None:
    assert BlockedLinear(torch.randn(5, 3), None)(torch.empty(0, 3)).shape == (0, 5)
    assert ops.blocked_linear(torch.randn(5, 3, dtype=torch.float64), None) is None


LARGE_SIZES = [(192, 256), (1100, 96), (97, 640)]


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def by_onednn(request, monkeypatch) -> bool:
    """Products as on processors that have one of the two as the faster."""
    monkeypatch.setattr(cpu, "_is_faster", lambda: request.param)
    return request.param


@pytest.mark.parametrize(("num_out", "num_in"), LARGE_SIZES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_and_their_gradients_are_those_in_float64(num_out, num_in, has_bias, by_onednn) -> None:
    torch.manual_seed(0)
    shapes = ((37, num_in), (num_out, num_in), (num_out,))
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes[: 3 if has_bias else 2]]
    assert cpu.linear_takes(inputs[1]) == by_onednn
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    slope = torch.randn(num_out, 37).T
    (ops.linear(*inputs) * slope).sum().backward()
    (torch.nn.functional.linear(*doubles) * slope.double()).sum().backward()
    for x, double in zip(inputs, doubles, strict=True):
        assert (x.grad - double.grad).abs().max() < 1e-5 * double.grad.abs().max()


@pytest.mark.parametrize(("num_out", "num_in"), LARGE_SIZES)
def test_training_and_packed_weights_give_a_row_the_same_bits(num_out, num_in, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "_is_faster", lambda: True)
    torch.manual_seed(0)
    weight, rows = torch.randn(num_out, num_in).requires_grad_(), torch.randn(1000, num_in)
    together = ops.linear(rows, weight)
    packed = BlockedLinear(weight, None)
    for num_rows in (1, 2, 3, 7, 16, 100, 511, 1000):
        assert ops.linear(rows[-num_rows:], weight).equal(together[-num_rows:]), num_rows
        assert packed(rows[-num_rows:]).equal(together[-num_rows:]), num_rows


@pytest.mark.parametrize("is_packed", [True, False])
def test_products_of_many_numbers_of_rows_leave_little_memory_behind(is_packed, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "_is_faster", lambda: True)
    weight = torch.randn(272, 144).requires_grad_()
    packed = BlockedLinear(weight, None)

    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    before = resident_mib()
    for num_rows in range(1, 301):
        if is_packed:
            packed(torch.randn(num_rows, 144))
        else:
            ops.linear(torch.randn(num_rows, 144).requires_grad_(), weight).sum().backward()
    assert resident_mib() - before < 80


def test_only_what_needs_a_gradient_gets_one(monkeypatch) -> None:
    monkeypatch.setattr(cpu, "_is_faster", lambda: True)
    weight, rows = torch.randn(256, 256), torch.randn(20, 256)
    assert not ops.linear(rows, weight).requires_grad
    ops.linear(rows.requires_grad_(), weight).sum().backward()
    assert weight.grad is None and rows.grad is not None
    assert ops.linear(rows[:0], weight).shape == (0, 256)
