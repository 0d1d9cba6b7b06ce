"""Operations on a CPU whose result for a row has the same bits whatever else is computed beside it.

So a token's log-prob is the same when a batch of other rows decodes beside it, when its row is scored in one piece,
and in the update. What that takes, in float32 on one thread:

- a matrix product rounds each row alike from LEAST_ROWS rows on, but differently with fewer: fewer are padded;
- silu and sigmoid round the last elements of a tensor differently from the rest; their parts exp, + and / don't;
- attention meets the keys in blocks at fixed positions, each as wide as the others, and a block that is masked
  whole changes no bit of what the ones before it gave.

This holds for forward passes only: gradients are right to rounding, as they are elsewhere.

Shape letters: `T` packed tokens, `B` rows, `Q` queries of a row, `S` key positions, `H` query heads, `J` key and value
heads, `K` head size of queries and keys, `U` head size of values, `M` rows sorted by expert, `E` experts, `D` inputs
and `O` outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.packed import PackedRows, nothing_attended
from spmdrl.engines.models.kernels.plain import LEAST_ROWS, linear

KEY_BLOCK = 64
# exp of more overflows float32, and its gradient is NaN then; 1 / (1 + exp(88)) is 6e-39, a 0 to whatever it is added.
_LARGEST_EXPONENT = 88.0


def sigmoid(x: Tensor) -> Tensor:
    return 1 / _one_plus_exp(-x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / _one_plus_exp(-gate) * up


def _one_plus_exp(x: Tensor) -> Tensor:
    return 1 + x.clamp(max=_LARGEST_EXPONENT).exp()


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    groups = zip(rows_MD.split(counts_E.tolist()), weights_EOD.unbind(), strict=True)
    return torch.cat([linear(rows, weight) for rows, weight in groups])


def masked_attention(q_BHQK: Tensor, k_BJSK: Tensor, v_BJSU: Tensor, mask: Tensor) -> Tensor:
    return _Attention.apply(q_BHQK, k_BJSK, v_BJSU, mask)


def packed_attention(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows) -> Tensor:
    # Row by row: rows of equal length together would give the same bits, sooner.
    attended = [nothing_attended(q_THK[:0], k_TJK[:0], v_TJU[:0])]
    for q, k, v in zip(*(heads.split(rows.lengths) for heads in (q_THK, k_TJK, v_TJU)), strict=True):
        q_1HQK, k_1JSK, v_1JSU = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        mask_QS = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
        attended.append(masked_attention(q_1HQK, k_1JSK, v_1JSU, mask_QS)[0].transpose(0, 1))
    return torch.cat(attended)


class _Attention(torch.autograd.Function):
    """Forward by blocks; backward through torch's own attention, which gives the same result to rounding."""

    @staticmethod
    def forward(ctx: Any, q_BHQK: Tensor, k_BJSK: Tensor, v_BJSU: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(q_BHQK, k_BJSK, v_BJSU, mask)
        return attend_by_blocks(q_BHQK, k_BJSK, v_BJSU, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *heads, mask = ctx.saved_tensors
        inputs = [values.detach().requires_grad_() for values in heads]
        with torch.enable_grad():
            out = plain.masked_attention(inputs[0], inputs[1], inputs[2], mask)
        return *torch.autograd.grad(out, inputs, gradient), None


def attend_by_blocks(q_BHQK: Tensor, k_BJSK: Tensor, v_BJSU: Tensor, mask: Tensor) -> Tensor:
    """Attention with a running softmax over blocks of keys (Milakov and Gimelshein 2018, Algorithm 3); no gradient.

    Each query has at least one key in the first block that the mask, which broadcasts to [B, 1, Q, S], lets it see.
    """
    mask = mask if mask.dtype == torch.bool else mask == 0
    num_rows, num_heads, num_queries, head_size = q_BHQK.shape
    num_kv_heads, value_size = k_BJSK.shape[1], v_BJSU.shape[-1]
    share = num_heads // num_kv_heads
    # All queries of a key head are the rows of one product, [B x J, share x Q, K].
    queries = q_BHQK.reshape(num_rows * num_kv_heads, share * num_queries, head_size)
    queries = F.pad(queries, (0, 0, 0, max(LEAST_ROWS - share * num_queries, 0)))
    mask = mask.expand(num_rows, 1, num_queries, -1)
    largest = queries.new_full((*queries.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(largest), queries.new_zeros(*queries.shape[:2], value_size)
    for start in range(0, k_BJSK.shape[2], KEY_BLOCK):
        keys, values = (_block(heads, start) for heads in (k_BJSK, v_BJSU))
        scores = torch.bmm(queries, keys.transpose(1, 2)) * head_size**-0.5
        scores.masked_fill_(_hidden(mask, start, num_kv_heads, share, scores.shape[1]), -torch.inf)
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - new_largest).exp(), (largest - new_largest).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.bmm(weights, values)
        largest = new_largest
    return (out / total)[:, : share * num_queries].reshape(num_rows, num_heads, num_queries, value_size)


def _block(heads_BJSK: Tensor, start: int) -> Tensor:
    """The block of keys or values that begins at `start` [B x J, KEY_BLOCK, K], filled up with zeros."""
    block = heads_BJSK[:, :, start : start + KEY_BLOCK]
    return F.pad(block, (0, 0, 0, KEY_BLOCK - block.shape[2])).flatten(0, 1).contiguous()


def _hidden(mask_B1QS: Tensor, start: int, num_kv_heads: int, share: int, num_padded: int) -> Tensor:
    """Which keys of the block each query must not see [B x J, padded share x Q, KEY_BLOCK]."""
    hidden = ~mask_B1QS[..., start : start + KEY_BLOCK]
    hidden = F.pad(hidden, (0, KEY_BLOCK - hidden.shape[-1]), value=True)
    hidden = hidden.repeat(1, 1, share, 1)
    # Queries that only pad see everything: what they give is cut off, but it must not be NaN.
    hidden = F.pad(hidden, (0, 0, 0, num_padded - hidden.shape[2]), value=False)
    return hidden.expand(-1, num_kv_heads, -1, -1).flatten(0, 1)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "swiglu": swiglu,
    "sigmoid": sigmoid,
    "grouped_linear": grouped_linear,
    # Training has F.linear.
    "blocked_linear": plain.blocked_linear,
    "masked_attention": masked_attention,
    # Pages are copied out and attended to as above.
    "paged_attention": plain.paged_attention,
    "packed_attention": packed_attention,
}
