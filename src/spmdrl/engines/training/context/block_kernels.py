"""Kernels for one padded block of attention with the logsumexp of its scores, forward and backward, without a graph.

Backward takes output and logsumexp of the *whole* softmax, of which the block may be a part: its probabilities are
exp(score - logsumexp) (FlashAttention-2, arXiv:2307.08691, section 3.1.2).

Shape letters: `B` rows, `H` query heads, `J` key and value heads, `Q` queries and `S` keys of a padded row, `K` head
size of queries, keys and values, `F` query heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

SCORES_CHUNK_BYTES = 128 << 20
"""Size of one float32 chunk of the plain kernel's scores; about three of them live at a time."""

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PaddedBlock:
    """Padded rows of queries with their keys and values."""

    q: Tensor
    """[B, H, Q, K]"""
    k: Tensor
    """[B, J, S, K]"""
    v: Tensor
    """[B, J, S, K]"""
    mask: Tensor | None
    """[B, 1, 1, S], added to the scores"""
    is_causal: bool
    scale: float


@dataclass(frozen=True)
class PaddedKernel:
    """Forward and backward of a padded block."""

    forward: Callable[[PaddedBlock], tuple[Tensor, Tensor]]
    """Returns output [B, H, Q, K] and logsumexp [B, H, Q]."""
    backward: Callable[[PaddedBlock, Tensor, Tensor, Tensor], Gradients]
    """Takes the output's gradient, output and logsumexp; returns the gradients of q, k and v."""


def padded_kernel(device_kind: str) -> PaddedKernel:
    """Return the fastest kernel that supports every dtype of this kind of device."""
    return PADDED_KERNELS.get(device_kind, PLAIN)


# The operators behind scaled_dot_product_attention: only they expose logsumexps.
def _cpu_flash_forward(block: PaddedBlock) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        block.q, block.k, block.v, 0.0, block.is_causal, attn_mask=_mask_like(block), scale=block.scale
    )


def _cpu_flash_backward(block: PaddedBlock, by_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        by_out,
        block.q,
        block.k,
        block.v,
        out,
        lse,
        0.0,
        block.is_causal,
        attn_mask=_mask_like(block),
        scale=block.scale,
    )


def _mask_like(block: PaddedBlock) -> Tensor | None:
    return None if block.mask is None else block.mask.to(block.q.dtype)


def plain_kernel(chunk_bytes: int) -> PaddedKernel:
    """Return the kernel for any device, in chunks of queries whose float32 scores take this many bytes."""
    return PaddedKernel(
        partial(_plain_forward, chunk_bytes=chunk_bytes), partial(_plain_backward, chunk_bytes=chunk_bytes)
    )


def _plain_forward(block: PaddedBlock, *, chunk_bytes: int) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(block.q), block.q.new_empty(block.q.shape[:-1], dtype=_wide(block.q))
    for queries, keys in _chunks(block, chunk_bytes):
        scores = _scores(block, queries, keys)
        lse_BJFQ = torch.logsumexp(scores, dim=-1)
        weights = scores.sub_(lse_BJFQ[..., None]).exp_().to(block.v.dtype)
        out[:, :, queries] = _per_query_head(_rows_by(weights, block.v[:, :, keys]))
        lse[:, :, queries] = _per_query_head(lse_BJFQ)
    return out, lse


def _plain_backward(block: PaddedBlock, by_out: Tensor, out: Tensor, lse: Tensor, *, chunk_bytes: int) -> Gradients:
    num_kv_heads = block.k.shape[1]
    by_q = torch.empty_like(block.q)
    by_k, by_v = (torch.zeros_like(x, dtype=_wide(x)) for x in (block.k, block.v))
    # d score = p * (d p - sum(d out * out)), as the rows of p sum to 1.
    share = (by_out * out).sum(-1, dtype=_wide(out))
    for queries, keys in _chunks(block, chunk_bytes):
        lse_BJFQ, share_BJFQ, by_out_BJFQK, q_BJFQK = (
            _per_kv_head(x[:, :, queries], num_kv_heads) for x in (lse, share, by_out, block.q)
        )
        weights = _scores(block, queries, keys).sub_(lse_BJFQ[..., None]).exp_()
        by_v[:, :, keys] += _columns_by(weights.to(by_out.dtype), by_out_BJFQK)
        by_scores = _rows_by(by_out_BJFQK, block.v[:, :, keys].mT).to(weights.dtype).sub_(share_BJFQ[..., None])
        by_scores = by_scores.mul_(weights).mul_(block.scale).to(block.q.dtype)
        by_q[:, :, queries] = _per_query_head(_rows_by(by_scores, block.k[:, :, keys]))
        by_k[:, :, keys] += _columns_by(by_scores, q_BJFQK)
    return by_q, by_k.to(block.k.dtype), by_v.to(block.v.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunks(block: PaddedBlock, chunk_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Yield queries whose scores fit into one chunk, with the keys that any of them sees."""
    num_rows, num_heads, num_queries = block.q.shape[:3]
    num_keys = block.k.shape[2]
    step = max(1, chunk_bytes // (4 * num_rows * num_heads * num_keys))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        yield slice(start, stop), slice(0, stop if block.is_causal else num_keys)


def _scores(block: PaddedBlock, queries: slice, keys: slice) -> Tensor:
    """Return scores [B, J, F, queries, keys], masked, in float32 or wider."""
    q_BJFQK = _per_kv_head(block.q[:, :, queries], block.k.shape[1])
    scores = _rows_by(q_BJFQK, block.k[:, :, keys].mT).to(_wide(block.q)).mul_(block.scale)
    if block.is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + queries.start)
        scores.masked_fill_(ahead, -torch.inf)
    if block.mask is not None:
        scores += block.mask[:, :, None, :, keys]
    return scores


def _per_kv_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """Return [B, H, ...] as [B, J, F, ...]."""
    return x.unflatten(1, (num_kv_heads, -1))


def _per_query_head(x: Tensor) -> Tensor:
    """Return [B, J, F, ...] as [B, H, ...]."""
    return x.flatten(1, 2)


def _rows_by(rows_BJFQX: Tensor, matrix_BJXY: Tensor) -> Tensor:
    """Return [B, J, F, Q, Y]: every group's rows times their key head's matrix, one product per key head."""
    return (rows_BJFQX.flatten(2, 3) @ matrix_BJXY).unflatten(2, rows_BJFQX.shape[2:4])


def _columns_by(left_BJFQX: Tensor, right_BJFQY: Tensor) -> Tensor:
    """Return [B, J, X, Y]: left transposed times right, summed over queries and groups."""
    return left_BJFQX.flatten(2, 3).mT @ right_BJFQY.flatten(2, 3)


CPU_FLASH = PaddedKernel(_cpu_flash_forward, _cpu_flash_backward)
PLAIN = plain_kernel(SCORES_CHUNK_BYTES)

PADDED_KERNELS = {"cpu": CPU_FLASH}
