"""Attention of packed query rows to packed key rows, as one part of a softmax over more keys.

Parts are joined by their logsumexps: each output has weight exp(its logsumexp - the joint one), and backward needs the
joint output and logsumexp only (FlashAttention-2, arXiv:2307.08691, sections 2.2 and 3.1.2).

Shape letters: `T` packed queries, `S` packed keys, `H` query heads, `J` key and value heads, `K` head size of queries
and keys, `U` of values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels.cuda import KINDS, Bounds, flash_backward, flash_can, flash_forward
from spmdrl.engines.training.context.block_kernels import PaddedBlock, padded_kernel
from spmdrl.engines.training.context.row_pairs import PaddedGroup, PaddedSide, Places, RowPairs

Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries [T, H, K], keys [S, J, K] and values [S, J, U]."""


def attend_rows(inputs: Inputs, pairs: RowPairs) -> tuple[Tensor, Tensor]:
    """Return output [T, H, U] and logsumexp of scores [T, H] of each query over its row's keys, without a graph."""
    scale = inputs[0].shape[-1] ** -0.5
    widened = _widened(inputs)
    if runs_packed_flash(widened[0]):
        out, lse = flash_forward(widened, _bounds(pairs), is_causal=pairs.is_causal, scale=scale)
    else:
        out, lse = _padded_forward(widened, pairs, scale=scale)
    return out[..., : inputs[2].shape[-1]], lse


def attend_rows_backward(by_out_THU: Tensor, inputs: Inputs, whole: tuple[Tensor, Tensor], pairs: RowPairs) -> Inputs:
    """Return these rows' contributions to the gradients of queries, keys and values.

    `inputs` as in `attend_rows`; `whole` is the output and the logsumexp over all keys of a query.
    """
    scale = inputs[0].shape[-1] ** -0.5
    widened = _widened(inputs)
    size = widened[0].shape[-1]
    by_out, out = (F.pad(x, (0, size - x.shape[-1])) for x in (by_out_THU, whole[0]))
    widened_whole = (out, whole[1])
    if runs_packed_flash(widened[0]):
        gradients = flash_backward(
            by_out, widened, widened_whole, _bounds(pairs), is_causal=pairs.is_causal, scale=scale
        )
    else:
        gradients = _padded_backward(by_out, widened, widened_whole, pairs, scale=scale)
    by_q, by_k, by_v = (gradient[..., : x.shape[-1]] for gradient, x in zip(gradients, inputs, strict=True))
    return by_q, by_k, by_v


def _widened(inputs: Inputs) -> Inputs:
    """Pad to one head size, as kernels require; zeros change neither scores nor the kept outputs."""
    size = max(x.shape[-1] for x in inputs)
    if inputs[0].device.type in KINDS:
        size += -size % 8
    q, k, v = (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in inputs)
    return q, k, v


def _padded_forward(inputs: Inputs, pairs: RowPairs, *, scale: float) -> tuple[Tensor, Tensor]:
    q_THK = inputs[0]
    out_THK = torch.empty_like(q_THK)
    lse_TH = q_THK.new_empty(q_THK.shape[:2], dtype=torch.promote_types(q_THK.dtype, torch.float32))
    for group in pairs.groups:
        out, lse = padded_kernel(q_THK.device.type).forward(_padded_block(inputs, group, pairs, scale))
        _put(out_THK, out, group.queries)
        _put(lse_TH, lse, group.queries)
    return out_THK, lse_TH


def _padded_backward(
    by_out_THK: Tensor, inputs: Inputs, whole: tuple[Tensor, Tensor], pairs: RowPairs, *, scale: float
) -> Inputs:
    kernel = padded_kernel(by_out_THK.device.type)
    # Zeros aren't needed, because every row with keys has queries too.
    by_q, by_k, by_v = (torch.empty_like(x) for x in inputs)
    for group in pairs.groups:
        out, lse = (_padded(x, group.queries.of_slot, group.num_rows) for x in whole)
        by_out = _padded(by_out_THK, group.queries.of_slot, group.num_rows)
        if group.queries.padding is not None:
            by_out = by_out.masked_fill(group.queries.padding, 0)
        block = _padded_block(inputs, group, pairs, scale)
        parts = kernel.backward(block, by_out, out, lse)
        _put(by_q, parts[0], group.queries)
        _put(by_k, parts[1], group.keys)
        _put(by_v, parts[2], group.keys)
    return by_q, by_k, by_v


def _padded_block(inputs: Inputs, group: PaddedGroup, pairs: RowPairs, scale: float) -> PaddedBlock:
    q_THK, k_SJK, v_SJK = inputs
    return PaddedBlock(
        q=_padded(q_THK, group.queries.of_slot, group.num_rows),
        k=_padded(k_SJK, group.keys.of_slot, group.num_rows),
        v=_padded(v_SJK, group.keys.of_slot, group.num_rows),
        mask=group.key_mask,
        is_causal=pairs.is_causal,
        scale=scale,
    )


def _padded(packed: Tensor, of_slot: Places, num_rows: int) -> Tensor:
    """Return [tokens, heads, ...] as [rows, heads, longest, ...]."""
    return packed[of_slot].unflatten(0, (num_rows, -1)).transpose(1, 2)


def _put(packed: Tensor, block: Tensor, side: PaddedSide) -> None:
    """Write the values of a block [rows, heads, longest, ...] back to their tokens."""
    packed[side.tokens] = block.transpose(1, 2).flatten(0, 1)[side.slots]


def runs_packed_flash(q_THK: Tensor) -> bool:
    """Return True if the kernels support these queries: half precision on NVIDIA compute capability 8 or higher."""
    return q_THK.device.type in KINDS and flash_can(q_THK)


def _bounds(pairs: RowPairs) -> Bounds:
    longest = (max(pairs.query_lengths_B), max(pairs.key_lengths_B))
    return (pairs.query_offsets, pairs.key_offsets, *longest)
