"""Attention of rows of queries to rows of keys in parts, on each kernel, against a softmax written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spmdrl.engines.training.context.block_attention import attend_rows, attend_rows_backward
from spmdrl.engines.training.context.block_kernels import CPU_FLASH, PaddedBlock, plain_kernel
from spmdrl.engines.training.context.row_pairs import RowPairs

CASES = {
    "causal": ([3, 30, 1, 7], [3, 30, 1, 7], True),
    "more keys": ([2, 15, 1, 6], [4, 30, 2, 12], False),
    "fewer keys": ([40, 2, 30], [20, 1, 15], False),
    "equal rows": ([5, 5, 5], [10, 10, 10], False),
}


def expected(inputs: list[Tensor], pairs: RowPairs) -> tuple[Tensor, Tensor]:
    q, k, v = inputs
    outs, lses = [], []
    lengths = (pairs.query_lengths_B, pairs.key_lengths_B, pairs.key_lengths_B)
    for q_row, k_row, v_row in zip(*(x.split(lens) for x, lens in zip((q, k, v), lengths, strict=True)), strict=True):
        share = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhk,thk->qht", q_row, k_row.repeat_interleave(share, 1)) / math.sqrt(q.shape[-1])
        if pairs.is_causal:
            ahead = torch.ones(len(q_row), len(k_row), dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(ahead[:, None], -torch.inf)
        outs.append(torch.einsum("qht,thk->qhk", scores.softmax(-1), v_row.repeat_interleave(share, 1)))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses)


def random_inputs(pairs: RowPairs, *, value_size: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    num_queries, num_keys = sum(pairs.query_lengths_B), sum(pairs.key_lengths_B)
    shapes = ((num_queries, 4, 8), (num_keys, 2, 8), (num_keys, 2, value_size))
    return [torch.randn(shape).to(pairs.device).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("value_size", [8, 5, 11])
@pytest.mark.parametrize("case", CASES)
def test_rows_attend_to_their_keys_with_logsumexps(case: str, value_size: int, device: torch.device) -> None:
    queries, keys, is_causal = CASES[case]
    pairs = RowPairs(queries, keys, is_causal=is_causal, device=device)
    inputs = random_inputs(pairs, value_size=value_size)
    whole = expected(inputs, pairs)
    by_out = torch.randn_like(whole[0])
    gradients = torch.autograd.grad(whole[0], inputs, by_out)
    with torch.no_grad():
        computed = attend_rows(tuple(inputs), pairs)
        parts = attend_rows_backward(by_out, tuple(inputs), computed, pairs)
    for ours, theirs in zip((*computed, *parts), (*whole, *gradients), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 4 * 2 * 4 * 9 * 2, 1])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_plain_kernel_gives_what_the_cpus_gives_in_any_chunks(is_causal: bool, chunk_bytes: int) -> None:
    torch.manual_seed(0)
    num_keys = 9 if is_causal else 12
    mask = torch.zeros(2, 1, 1, num_keys)
    mask[1, ..., 7:] = -torch.inf
    shapes = [(2, 4, 9, 8), (2, 2, num_keys, 8), (2, 2, num_keys, 8)]
    block = PaddedBlock(*(torch.randn(shape) for shape in shapes), None if is_causal else mask, is_causal, 0.3)
    whole, by_out = CPU_FLASH.forward(block), torch.randn_like(block.q)
    gradients = CPU_FLASH.backward(block, by_out, *whole)
    plain = plain_kernel(chunk_bytes)
    for ours, theirs in zip(
        (*plain.forward(block), *plain.backward(block, by_out, *whole)), (*whole, *gradients), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_bfloat16_stays_near_float32(device: torch.device) -> None:
    pairs = RowPairs([2, 15], [4, 30], is_causal=False, device=device)
    inputs = [x.detach() for x in random_inputs(pairs)]
    exact, lse = attend_rows(tuple(inputs), pairs)
    near, near_lse = attend_rows(tuple(x.to(torch.bfloat16) for x in inputs), pairs)
    assert near.dtype == torch.bfloat16 and near_lse.dtype == torch.float32
    torch.testing.assert_close(near.float(), exact, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(near_lse, lse, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", CASES)
def test_packed_flash_on_cuda_stays_near_float32(case: str) -> None:
    queries, keys, is_causal = CASES[case]
    pairs = RowPairs(queries, keys, is_causal=is_causal, device=torch.device("cuda"))
    inputs = random_inputs(pairs, value_size=5)
    whole = expected(inputs, pairs)
    by_out = torch.randn_like(whole[0])
    gradients = torch.autograd.grad(whole[0], inputs, by_out)
    halves = tuple(x.detach().to(torch.bfloat16) for x in inputs)
    computed = attend_rows(halves, pairs)
    parts = attend_rows_backward(by_out.to(torch.bfloat16), halves, computed, pairs)
    for ours, theirs in zip((*computed, *parts), (*whole, *gradients), strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=6e-2, rtol=6e-2)
