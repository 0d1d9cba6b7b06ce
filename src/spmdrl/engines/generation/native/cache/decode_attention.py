"""Attention of one new token a row over the paged cache.

Shape letters: `B` rows, `C` blocks of a table, `S` cached positions, `H` query heads, `J` key and
value heads, `G` query heads that share one, `K` head size of queries and keys, `V` head size of values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.generation.native.cache.paged import SCRATCH_BLOCK, PagedCache
from spmdrl.engines.models.kernels import ops


@dataclass(frozen=True)
class _Bucket:
    """Rows beside each other whose block tables are padded to the same length."""

    rows: slice
    head_blocks_BJC: Tensor
    bias_B11S: Tensor
    """Added to the scores: -inf behind a row's end."""


class DecodeAttention:
    """Attend from one new token of each row to its cached positions, the new one included; an `Attend`.

    Rows are bucketed by their own length alone, so that a row is padded, and rounded, alike in every batch.
    """

    def __init__(self, cache: PagedCache, tables: Sequence[Sequence[int]], lengths: Sequence[int]):
        """Row b has `lengths[b]` positions in the blocks `tables[b]`, the new token's included.

        Only rows beside each other share a bucket, so rows sorted by length take least time.
        """
        self._cache = cache
        size = cache.shape.block_size
        places = [
            table[(length - 1) // size] * size + (length - 1) % size
            for table, length in zip(tables, lengths, strict=True)
        ]
        self._head_places = cache.head_places(torch.tensor(places, device=cache.device))
        widths = [_padded_width(-(-length // size)) for length in lengths]
        self._buckets: list[_Bucket] = []
        start = 0
        for width, members in itertools.groupby(widths):
            rows = slice(start, start + len(list(members)))
            self._buckets.append(self._bucket(width, rows, tables[rows], lengths[rows]))
            start = rows.stop

    def _bucket(self, width: int, rows: slice, tables_B: Sequence[Sequence[int]], lengths_B: Sequence[int]) -> _Bucket:
        device, size = self._cache.device, self._cache.shape.block_size
        padded = [[*table[:width], *[SCRATCH_BLOCK] * (width - len(table))] for table in tables_B]
        is_behind_BS = torch.arange(width * size, device=device) >= torch.tensor(lengths_B, device=device)[:, None]
        # Not as a mask of booleans, which every layer's attention would turn into this.
        bias_BS = torch.zeros(is_behind_BS.shape, dtype=self._cache.shape.dtype, device=device)
        bias_BS.masked_fill_(is_behind_BS, -torch.inf)
        head_blocks_BJC = self._cache.head_blocks(torch.tensor(padded, device=device))
        return _Bucket(rows, head_blocks_BJC, bias_BS[:, None, None, :])

    def __call__(self, layer: int, q_BHK: Tensor, k_BJK: Tensor, v_BJV: Tensor) -> Tensor:
        self._cache.write_heads(layer, self._head_places, k_BJK, v_BJV)
        # Query heads that share a key head are its queries, so that it is read once for all of them.
        q_BJGK = q_BHK.unflatten(1, (k_BJK.shape[1], -1))
        attended = []
        for bucket in self._buckets:
            keys_BSJK, values_BSJV = self._cache.read_heads(layer, bucket.head_blocks_BJC)
            attended_BJGV = ops.masked_attention(
                q_BJGK[bucket.rows], keys_BSJK.transpose(1, 2), values_BSJV.transpose(1, 2), bucket.bias_B11S
            )
            attended.append(attended_BJGV.flatten(1, 2))
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def _padded_width(num_blocks: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not below: few buckets, at most half of one padded."""
    power = 1 << max(num_blocks - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and num_blocks <= power * 3 // 4 else power
