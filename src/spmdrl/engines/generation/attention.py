"""Attention over the paged cache: whole prompts when a group starts, one token a row afterwards.

Shape letters: `T` packed tokens, `B` rows, `C` blocks of a table, `S` cached positions, `H` query heads, `J` key and
value heads, `K` head size of queries and keys, `V` head size of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.generation.paged import SCRATCH_BLOCK, PagedCache
from spmdrl.engines.models.attention import PackedCausalAttention


class PromptAttention:
    """Attend inside packed prompts and leave their keys and values in the cache; an `Attend`."""

    def __init__(self, cache: PagedCache, places_T: Tensor, offsets: Tensor):
        self._cache = cache
        self._places_T = places_T
        self._attend = PackedCausalAttention(offsets)

    def __call__(self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJV: Tensor) -> Tensor:
        self._cache.write(layer, self._places_T, k_TJK, v_TJV)
        return self._attend(layer, q_THK, k_TJK, v_TJV)


@dataclass(frozen=True)
class _Bucket:
    """Rows whose block tables are padded to the same length."""

    rows: Tensor | slice
    tables_BC: Tensor
    mask_B11S: Tensor


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
        self._places_B = torch.tensor(places, device=cache.device)
        by_width: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            by_width.setdefault(_padded_width(-(-length // size)), []).append(row)
        self._buckets = [self._bucket(width, rows, tables, lengths) for width, rows in by_width.items()]

    def _bucket(self, width: int, rows: list[int], tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> _Bucket:
        device, size = self._cache.device, self._cache.shape.block_size
        padded = [[*tables[row][:width], *[SCRATCH_BLOCK] * (width - len(tables[row]))] for row in rows]
        lengths_B1 = torch.tensor([[lengths[row]] for row in rows], device=device)
        mask_BS = torch.arange(width * size, device=device) < lengths_B1
        index = slice(None) if len(rows) == len(lengths) else torch.tensor(rows, device=device)
        return _Bucket(index, torch.tensor(padded, device=device), mask_BS[:, None, None, :])

    def __call__(self, layer: int, q_BHK: Tensor, k_BJK: Tensor, v_BJV: Tensor) -> Tensor:
        self._cache.write(layer, self._places_B, k_BJK, v_BJV)
        out_BHV = q_BHK.new_empty(*q_BHK.shape[:2], v_BJV.shape[-1])
        for bucket in self._buckets:
            keys_BSJK, values_BSJV = self._cache.read(layer, bucket.tables_BC)
            out_BHV[bucket.rows] = F.scaled_dot_product_attention(
                q_BHK[bucket.rows].unsqueeze(2),
                keys_BSJK.transpose(1, 2),
                values_BSJV.transpose(1, 2),
                attn_mask=bucket.mask_B11S,
                enable_gqa=q_BHK.shape[1] != k_BJK.shape[1],
            ).squeeze(2)
        return out_BHV


def _padded_width(num_blocks: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not below: few buckets, at most half of one padded."""
    power = 1 << max(num_blocks - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and num_blocks <= power * 3 // 4 else power
