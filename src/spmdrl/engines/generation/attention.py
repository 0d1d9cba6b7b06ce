"""Attention of one new token a row over the paged cache.

Shape letters: `B` rows, `C` blocks of a table, `S` cached positions, `H` query heads, `J` key and
value heads, `G` query heads that share one, `K` head size of queries and keys, `V` head size of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.generation.paged import SCRATCH_BLOCK, PagedCache
from spmdrl.engines.models.kernels import ops


@dataclass(frozen=True)
class _Bucket:
    """Rows whose block tables are padded to the same length."""

    rows: Tensor | slice
    head_blocks_BJC: Tensor
    bias_B11S: Tensor
    """Added to the scores: -inf behind a row's end."""


class DecodeAttention:
    """Attend from one new token of each row to its cached positions, the new one included; an `Attend`.

    Rows are bucketed by their own length alone, so that a row is padded, and rounded, alike in every batch.
    """

    def __init__(self, cache: PagedCache, tables: Sequence[Sequence[int]], lengths: Sequence[int]):
        """Row b has `lengths[b]` positions in the blocks `tables[b]`, the new token's included."""
        self._cache = cache
        size = cache.shape.block_size
        places = [
            table[(length - 1) // size] * size + (length - 1) % size
            for table, length in zip(tables, lengths, strict=True)
        ]
        self._head_places = cache.head_places(torch.tensor(places, device=cache.device))
        by_width: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            by_width.setdefault(_padded_width(-(-length // size)), []).append(row)
        self._buckets = [self._bucket(width, rows, tables, lengths) for width, rows in by_width.items()]

    def _bucket(self, width: int, rows: list[int], tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> _Bucket:
        device, size = self._cache.device, self._cache.shape.block_size
        padded = [[*tables[row][:width], *[SCRATCH_BLOCK] * (width - len(tables[row]))] for row in rows]
        lengths_B1 = torch.tensor([[lengths[row]] for row in rows], device=device)
        is_behind_BS = torch.arange(width * size, device=device) >= lengths_B1
        # Not as a mask of booleans, which every layer's attention would turn into this.
        bias_BS = torch.zeros(is_behind_BS.shape, dtype=self._cache.shape.dtype, device=device)
        bias_BS.masked_fill_(is_behind_BS, -torch.inf)
        index = slice(None) if len(rows) == len(lengths) else torch.tensor(rows, device=device)
        head_blocks_BJC = self._cache.head_blocks(torch.tensor(padded, device=device))
        return _Bucket(index, head_blocks_BJC, bias_BS[:, None, None, :])

    def __call__(self, layer: int, q_BHK: Tensor, k_BJK: Tensor, v_BJV: Tensor) -> Tensor:
        self._cache.write_heads(layer, self._head_places, k_BJK, v_BJV)
        # Query heads that share a key head are its queries, so that it is read once for all of them.
        q_BJGK = q_BHK.unflatten(1, (k_BJK.shape[1], -1))
        out_BJGV = q_BJGK.new_empty(*q_BJGK.shape[:3], v_BJV.shape[-1])
        for bucket in self._buckets:
            keys_BSJK, values_BSJV = self._cache.read_heads(layer, bucket.head_blocks_BJC)
            out_BJGV[bucket.rows] = ops.masked_attention(
                q_BJGK[bucket.rows], keys_BSJK.transpose(1, 2), values_BSJV.transpose(1, 2), bucket.bias_B11S
            )
        return out_BJGV.flatten(1, 2)


def _padded_width(num_blocks: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not below: few buckets, at most half of one padded."""
    power = 1 << max(num_blocks - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and num_blocks <= power * 3 // 4 else power
