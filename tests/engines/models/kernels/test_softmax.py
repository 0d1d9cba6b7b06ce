"""The CPU library's sums over a vocabulary and their gradients: right, alike for a row whatever is beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.cpp import elementwise
from tests.engines.models.support import no_cpu_library

pytestmark = pytest.mark.cpu_only(reason="the library is the CPU's")

# Sizes that fill whole vectors and that don't, of one run of sums and of several.
SHAPES = [(5, 3), (7, 16), (3, 1000), (2, 1024), (4, 2051), (2, 50_000), (0, 7)]


def logits_of(shape: tuple[int, int], scale: float = 4.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * scale


def rated(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What logits are above their highest, log of their sum, entropy, and the two sums, in float64."""
    above = logits.double() - logits.double().amax(-1, keepdim=True)
    sums, weighted = above.exp().sum(-1), (above.exp() * above).sum(-1)
    return above, sums.log(), sums.log() - weighted / sums, sums, weighted


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_equal_those_in_float64(shape: tuple[int, int]) -> None:
    logits = logits_of(shape)
    above, _, _, sums, weighted = rated(logits)
    ours = elementwise.exponential_sums(logits, logits.amax(-1) if logits.numel() else logits.new_empty(0))
    for result, exact in zip((logits, *ours), (above, sums, weighted), strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("given", [(True, False), (False, True), (True, True)], ids=["logprob", "entropy", "both"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_those_in_float64(shape: tuple[int, int], given: tuple[bool, bool]) -> None:
    above, log_sum, entropy, _, _ = rated(logits_of(shape))
    g, h = (torch.linspace(-1, 1.3, len(above)) if wanted else None for wanted in given)
    logprobs = above - log_sum[:, None]
    factors = (0 if g is None else g.double()[:, None]) + (
        0 if h is None else h.double()[:, None] * (logprobs + entropy[:, None])
    )
    ours = elementwise.minus_expected(above.float(), log_sum.float(), entropy.float(), g, h)
    torch.testing.assert_close(ours.double(), -logprobs.exp() * factors, rtol=2e-5, atol=1e-7)


def both(logits: Tensor) -> list[Tensor]:
    logits = logits.clone()
    sums, weighted = elementwise.exponential_sums(logits, logits.amax(-1))
    above, log_sum = logits.clone(), sums.log()
    pulls = torch.full_like(sums, 0.3)
    return [above, sums, weighted, elementwise.minus_expected(logits, log_sum, log_sum - weighted / sums, pulls, pulls)]


def test_a_row_has_the_same_bits_beside_any_others_and_on_any_threads() -> None:
    logits, threads = logits_of((9, 2051)), torch.get_num_threads()
    whole = both(logits)
    for first, stop in ((0, 1), (3, 5), (8, 9)):
        for part, all_of_it in zip(both(logits[first:stop]), whole, strict=True):
            assert torch.equal(part, all_of_it[first:stop])
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(both(logits), whole, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_what_cannot_be_drawn_has_no_part_and_nan_spreads() -> None:
    logits = logits_of((3, 40))
    logits[0, 7] = -torch.inf
    logits[1, 3] = torch.nan
    above, sums, weighted, gradient = both(logits)
    assert sums[0].isfinite() and weighted[0].isfinite() and gradient[0].isfinite().all() and gradient[0, 7] == 0
    assert sums[1].isnan() and gradient[1].isnan().all()
    assert sums[2].isfinite() and gradient[2].isfinite().all()


def test_without_the_library_the_plain_ones_run() -> None:
    logits = logits_of((4, 2051))
    with_it = both(logits)
    with no_cpu_library():
        without = both(logits)
    for ours, plainly in zip(with_it, without, strict=True):
        torch.testing.assert_close(ours, plainly, rtol=2e-5, atol=1e-6)


def test_logits_that_lie_apart_are_read_where_they_lie() -> None:
    logits = logits_of((6, 50))
    apart, copied = logits.clone()[:, ::2], logits[:, ::2].contiguous()
    expected = plain.exponential_sums(copied.clone(), copied.amax(-1))
    for ours, plainly in zip(elementwise.exponential_sums(apart, copied.amax(-1)), expected, strict=True):
        torch.testing.assert_close(ours, plainly)
