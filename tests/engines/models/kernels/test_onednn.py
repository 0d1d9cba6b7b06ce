"""Linear layers with weights in blocks: right, alike for a row whatever is beside it, and reversible."""

from __future__ import annotations

import pytest
import torch

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.onednn import BlockedLinear, blocked_linear_takes

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
    for num_rows in (4, 5, 7, 8, 12, 16, 31, 64, 129):
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
