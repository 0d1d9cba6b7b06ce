"""Operations on a CPU whose result for a row has the same bits whatever else is computed beside it.

So a token's log-prob is the same when a batch of other rows decodes beside it, when its row is scored in one piece,
and in the update. What that takes, in float32 on one thread:

- a matrix product rounds each row alike from LEAST_ROWS rows on, but differently with fewer: fewer are padded; its
  columns are rounded alike whatever other columns there are, from 11 on: with fewer, as of an adapter's A, a row rounds
  by where it lies in memory, so that they are filled up to LEAST_COLUMNS;
- silu and sigmoid round the last elements of a tensor, those that fill no vector, differently from the rest: tensors
  are filled up;
- how attention's sum over the keys is split depends on their number. The CPU's library goes through them one by one,
  in whole rows and in the cache. Without it the number of keys that a query meets follows from its position alone
  (`key_width`), and those behind it add zeros; up to FIRST_TILE no sum is split.

This holds for forward passes only: gradients are right to rounding, as they are elsewhere.

Shape letters: `T` packed tokens, `B` rows, `Q` queries of a row, `S` key positions, `H` query heads, `J` key and value
heads, `K` head size of queries and keys, `U` head size of values, `M` rows sorted by expert, `E` experts, `D` inputs
and `O` outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.cpp import row_attention
from spmdrl.engines.models.kernels.cpp.cpu_library import library_for
from spmdrl.engines.models.kernels.packed import PackedRows, pad_values, padded_attention
from spmdrl.engines.models.kernels.plain import LEAST_ROWS
from spmdrl.engines.models.kernels.prefixed import PrefixedRows, padded_prefixed_attention

FIRST_TILE = 128
"""The queries of a row before this position may meet any number of keys from their own on, up to this."""
LARGEST_BLOCK = 64
"""What divides this, as a size of key blocks, divides all widths from FIRST_TILE on."""
LEAST_COLUMNS = 16
# Two of the widest vectors, which is what a loop over elements takes at a time, in any dtype.
_ELEMENTS_AT_A_TIME = 64
_LEAST_KEYS = 16


def linear(rows_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    lacking = LEAST_COLUMNS - len(weight_OD)
    if lacking <= 0:
        return plain.linear(rows_MD, weight_OD, bias_O)
    out = plain.linear(rows_MD, F.pad(weight_OD, (0, 0, 0, lacking)))[..., :-lacking]
    return out if bias_O is None else out + bias_O


def sigmoid(x: Tensor) -> Tensor:
    return _in_whole_vectors(torch.sigmoid, x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _in_whole_vectors(F.silu, gate) * up


def _in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x, none of whose elements is left over when vectors are filled."""
    if x.shape[-1] % _ELEMENTS_AT_A_TIME == 0:
        return function(x)
    lacking = -x.numel() % _ELEMENTS_AT_A_TIME
    return function(F.pad(x.flatten(), (0, lacking)))[: x.numel()].view_as(x)


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    groups = zip(rows_MD.split(counts_E.tolist()), weights_EOD.unbind(), strict=True)
    return torch.cat([linear(rows, weight) for rows, weight in groups])


def key_width(num_keys: int) -> int:
    """The least of 16, 32, 48, 64, 96, 128, 192, 256, ... that is not below."""
    power = max(_LEAST_KEYS, 1 << (num_keys - 1).bit_length())
    return power * 3 // 4 if power > 2 * _LEAST_KEYS and num_keys <= power * 3 // 4 else power


def masked_attention(q_BHQK: Tensor, k_BJSK: Tensor, v_BJSU: Tensor, mask: Tensor) -> Tensor:
    """Keys behind FIRST_TILE are as many as `key_width` of each query's position, less what the mask hides."""
    num_queries, num_keys = q_BHQK.shape[2], k_BJSK.shape[2]
    scale, lacking_rows = _scale_of(q_BHQK), max(LEAST_ROWS - num_queries, 0)
    q_BHQK, k_BJSK = _in_whole_fours(F.pad(q_BHQK, (0, 0, 0, lacking_rows))), _in_whole_fours(k_BJSK)
    if mask.shape[-2] > 1:
        mask = F.pad(mask, (0, 0, 0, lacking_rows))
    lacking = key_width(num_keys) - num_keys
    if lacking:
        k_BJSK, v_BJSU = (F.pad(heads, (0, 0, 0, lacking)) for heads in (k_BJSK, v_BJSU))
        mask = F.pad(mask, (0, lacking), value=False if mask.dtype == torch.bool else -torch.inf)
    values, has_shared_keys = pad_values(k_BJSK, v_BJSU), q_BHQK.shape[1] != k_BJSK.shape[1]
    out = F.scaled_dot_product_attention(
        q_BHQK, k_BJSK, values, attn_mask=mask, scale=scale, enable_gqa=has_shared_keys
    )
    return out[:, :, :num_queries, : v_BJSU.shape[-1]]


def packed_attention(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows) -> Tensor:
    if library_for(q_THK, k_TJK, v_TJU) is not None:
        return row_attention.packed_attention(q_THK, k_TJK, v_TJU, rows)
    attend = partial(_CausalAttention.apply, _scale_of(q_THK))
    queries, keys = _in_whole_fours(q_THK), _in_whole_fours(k_TJK)
    return padded_attention(queries, keys, v_TJU, rows.padded(q_THK.device), attend)


def paged_attention(q_BHK: Tensor, keys: Tensor, values: Tensor, tables_BC: Tensor, lengths_B: Tensor) -> Tensor:
    library = library_for(q_BHK, keys, values)
    if library is None:
        return plain.paged_attention(q_BHK, keys, values, tables_BC, lengths_B)
    return row_attention.cached_attention(library, q_BHK, keys, values, tables_BC, lengths_B)


def prefixed_attention(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PrefixedRows) -> Tensor:
    if library_for(q_THK, k_TJK, v_TJU) is not None:
        return row_attention.prefixed_attention(q_THK, k_TJK, v_TJU, rows)
    attend = partial(_CausalAttention.apply, _scale_of(q_THK))
    return padded_prefixed_attention(_in_whole_fours(q_THK), _in_whole_fours(k_TJK), v_TJU, rows, attend)


def _scale_of(heads: Tensor) -> float:
    return heads.shape[-1] ** -0.5


def _in_whole_fours(heads: Tensor) -> Tensor:
    """Queries or keys with zeros up to a head size that 4 divides; products of others round by their other sizes."""
    lacking = -heads.shape[-1] % 4
    return F.pad(heads, (0, lacking)) if lacking else heads


class _CausalAttention(torch.autograd.Function):
    """Forward by tiles of queries; backward at once, as that of the whole, which is the same to rounding."""

    @staticmethod
    def forward(ctx: Any, scale: float, q_BHQK: Tensor, k_BJQK: Tensor, v_BJQK: Tensor) -> Tensor:
        num_queries = q_BHQK.shape[2]
        queries = F.pad(q_BHQK, (0, 0, 0, -num_queries % LEAST_ROWS))
        lacking = key_width(num_queries) - num_queries
        keys, values = (F.pad(heads, (0, 0, 0, lacking)) for heads in (k_BJQK, v_BJQK))
        tiles = zip(*_attended_tiles(queries, keys, values, scale), strict=True)
        out, log_sum = (_one_after_the_other(parts)[:, :, :num_queries] for parts in tiles)
        ctx.scale = scale
        ctx.save_for_backward(q_BHQK, k_BJQK, v_BJQK, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return None, *whole(gradient, *ctx.saved_tensors, dropout_p=0.0, is_causal=True, scale=ctx.scale)


def _attended_tiles(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Output and logarithm of the sum of exponentials of one tile of queries after the other."""
    start, num_queries = 0, queries.shape[2]
    while start < num_queries:
        width = key_width(max(start + 1, min(FIRST_TILE, num_queries)))
        stop = min(width, num_queries)
        mask = _later_keys(start, stop, width, queries.dtype) if start else None
        tile, keys_met, values_met = queries[:, :, start:stop], keys[:, :, :width], values[:, :, :width]
        yield torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            tile, keys_met, values_met, is_causal=mask is None, attn_mask=mask, scale=scale
        )
        start = stop


def _one_after_the_other(tiles: Sequence[Tensor]) -> Tensor:
    """Tiles [B, H, ...] along the queries, laid out in memory as each of them is: tokens before heads."""
    return tiles[0] if len(tiles) == 1 else torch.cat([tile.transpose(1, 2) for tile in tiles], 1).transpose(1, 2)


@lru_cache(maxsize=16)
def _later_keys(start: int, stop: int, width: int, dtype: torch.dtype) -> Tensor:
    """What hides from the queries [start, stop) those of the first `width` keys that come after them [Q, S]."""
    return torch.full((stop - start, width), -torch.inf, dtype=dtype).triu_(start + 1)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "swiglu": swiglu,
    "sigmoid": sigmoid,
    "grouped_linear": grouped_linear,
    "linear": linear,
    # Its bits are others than those of F.linear.
    "blocked_linear": plain.blocked_linear,
    # The generator sums them so.
    "exponential_sums": plain.exponential_sums,
    "masked_attention": masked_attention,
    "paged_attention": paged_attention,
    "packed_attention": packed_attention,
    "prefixed_attention": prefixed_attention,
}
