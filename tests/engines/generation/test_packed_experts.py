"""Packed experts give what plain ones give, and each row the same bits whatever is beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmdrl.engines.generation.native.packed_experts import ExpertsProduct
from spmdrl.engines.models.kernels.onednn import blocked_linear_takes
from spmdrl.engines.models.moe import Experts, MoeConfig

pytestmark = pytest.mark.cpu_only(reason="no other device has a layout to pack weights in")

COUNTS = [(3, 0, 1, 12), (0, 0, 0, 2), (1, 1, 1, 1), (0, 1, 0, 0), (0, 0, 0, 0), (40, 2, 0, 1)]


def packed_experts(hidden_size: int, width: int, dtype: torch.dtype) -> tuple[Experts, ExpertsProduct]:
    """Packed experts, and other plain ones with the same weights."""
    if not blocked_linear_takes(torch.empty(0, dtype=dtype)):
        pytest.skip(f"this CPU has no such products of {dtype}")
    config = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=width)
    plain, packed = (Experts(hidden_size, config).to(dtype).requires_grad_(False) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for weight, other in zip(plain.parameters(), packed.parameters(), strict=True):
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
        other.copy_(weight)
    product = ExpertsProduct(packed)
    product.pack()
    assert product.is_packed
    return plain, product


def rows_of(num_rows: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_give_what_plain_ones_give(dtype: torch.dtype) -> None:
    plain, product = packed_experts(256, 272, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for counts in COUNTS:
        rows_MD = rows_of(sum(counts), 256, dtype)
        found_MD, expected_MD = (compute(rows_MD, torch.tensor(counts)) for compute in (product, plain.compute))
        torch.testing.assert_close(found_MD, expected_MD, atol=tolerance, rtol=tolerance)
    for weight, expected in zip(product.unpacked(), plain.parameters(), strict=True):
        assert weight.equal(expected)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# With the larger ones, oneDNN rounds a product of one row otherwise.
@pytest.mark.parametrize(("hidden_size", "width"), [(256, 272), (2048, 768)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(hidden_size: int, width: int, dtype: torch.dtype) -> None:
    _, product = packed_experts(hidden_size, width, dtype)
    row_1D = rows_of(1, hidden_size, dtype)
    others_MD = rows_of(60, hidden_size, dtype)[1:]
    for expert in range(4):
        alone = torch.zeros(4, dtype=torch.int64)
        alone[expert] = 1
        expected_1D = product(row_1D, alone)
        for before, behind in ((0, 1), (3, 0), (5, 17), (18, 40)):
            # The row is among `before` and `behind` others of its expert, and each other expert has one row.
            beside = [others_MD[:expert], others_MD[:before], row_1D, others_MD[before : before + behind]]
            counts = torch.ones(4, dtype=torch.int64)
            counts[expert] += before + behind
            rows_MD = torch.cat((*beside, others_MD[: 3 - expert]))
            assert product(rows_MD, counts)[expert + before].equal(expected_1D[0]), (expert, before, behind)


def test_small_experts_stay_as_they_are() -> None:
    experts = Experts(32, MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=16))
    product = ExpertsProduct(experts)
    product.pack()
    assert not product.is_packed and product.num_bytes == 0
