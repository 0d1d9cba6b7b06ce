"""Flash attention on packed rows, with logsumexps, for CUDA: what torch.nn.attention.varlen runs on.

That module's public function gives the logsumexp, but takes none for the backward of a part of a softmax.

Shape letters: `T` packed queries, `S` packed keys, `H` query heads, `J` key and value heads, `K` head size of queries,
keys and values alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.engines.training.context.row_pairs import RowPairs

_LARGEST_HEAD_SIZE = 256


def runs_packed_flash(q_THK: Tensor) -> bool:
    """Whether the kernels take queries like these: half precision on an NVIDIA GPU of compute capability 8 or more."""
    return (
        q_THK.device.type == "cuda"
        and q_THK.dtype in (torch.bfloat16, torch.float16)
        and q_THK.shape[-1] % 8 == 0
        and q_THK.shape[-1] <= _LARGEST_HEAD_SIZE
        and torch.cuda.get_device_capability(q_THK.device)[0] >= 8
    )


def packed_flash_forward(
    inputs: tuple[Tensor, Tensor, Tensor], pairs: RowPairs, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [T, H, K] and logsumexp [T, H] of queries [T, H, K], keys and values [S, J, K]."""
    out_THK, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        *inputs, *_bounds(pairs), 0.0, pairs.is_causal, False, scale=scale
    )
    return out_THK, lse_HT.T


def packed_flash_backward(
    by_out_THK: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    whole: tuple[Tensor, Tensor],
    pairs: RowPairs,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from output and logsumexp of the whole softmax."""
    out_THK, lse_TH = whole
    # The random state serves dropout alone.
    random_state = torch.zeros(2, dtype=torch.uint64, device=by_out_THK.device)
    unused = torch.empty(0, device=by_out_THK.device)
    return torch.ops.aten._flash_attention_backward(
        by_out_THK,
        *inputs,
        out_THK,
        lse_TH.T.contiguous(),
        *_bounds(pairs),
        0.0,
        pairs.is_causal,
        random_state,
        unused,
        scale=scale,
    )


def _bounds(pairs: RowPairs) -> tuple[Tensor, Tensor, int, int]:
    longest = (max(pairs.query_lengths_B), max(pairs.key_lengths_B))
    return (pairs.query_offsets, pairs.key_offsets, *longest)
