"""Attention of prompt chunks to what is cached before them and to themselves.

Shape letters: `T` packed tokens, `N` rows that meet in one tile, `Q` queries of a tile, `C` blocks of a table, `S`
cached positions, `H` query heads, `J` key and value heads, `K` head size of queries and keys, `V` head size of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.generation.native.cache.paged import SCRATCH_BLOCK, PagedCache
from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.types import offsets_of

# Short enough for short prompts not to be mostly padding, long enough for few attention calls.
_CPU_TILE, _DEVICE_TILE = 32, 128


@dataclass(frozen=True)
class Span:
    """The positions [start, stop) of one row, whose blocks `table` hold all that is before them."""

    table: Sequence[int]
    start: int
    stop: int


@dataclass(frozen=True)
class _Tile:
    """The same tile of several rows."""

    tokens_NQ: Tensor
    """Which packed token each query is; where a row has none there, some other token."""
    tables_NC: Tensor
    is_real_NQ: Tensor
    mask_QS: Tensor


class PrefillAttention:
    """Write the keys and values of packed spans into the cache and attend from them; an `Attend`.

    On a CPU the queries of a row are cut in tiles at fixed positions, and a tile always meets the keys up to its own
    end: so a token's attention is rounded alike however its row is cut in spans and whatever is beside it.
    On accelerators that holds for spans behind cached ones; spans from position 0 use the kernel for whole rows.
    """

    def __init__(self, cache: PagedCache, spans: Sequence[Span]):
        self._cache = cache
        size = cache.shape.block_size
        places = [span.table[place // size] * size + place % size for span in spans for place in _places(span)]
        self._places_T = torch.tensor(places, device=cache.device)
        self._tiles: list[_Tile] = []
        self._attend_whole: PackedCausalAttention | None = None
        if cache.device.type != "cpu" and not any(span.start for span in spans):
            self._attend_whole = PackedCausalAttention(offsets_of([span.stop for span in spans]))
        else:
            width = _CPU_TILE if cache.device.type == "cpu" else _DEVICE_TILE
            self._tiles = _tiles(spans, width, size, cache.device)

    def __call__(self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJV: Tensor) -> Tensor:
        self._cache.write(layer, self._places_T, k_TJK, v_TJV)
        if self._attend_whole is not None:
            return self._attend_whole(layer, q_THK, k_TJK, v_TJV)
        out_THV = q_THK.new_empty(*q_THK.shape[:2], v_TJV.shape[-1])
        for tile in self._tiles:
            # Read after all was written: rows may share blocks that this very forward fills.
            keys_NSJK, values_NSJV = self._cache.read(layer, tile.tables_NC)
            attended_NHQV = ops.masked_attention(
                q_THK[tile.tokens_NQ].transpose(1, 2),
                keys_NSJK.transpose(1, 2),
                values_NSJV.transpose(1, 2),
                tile.mask_QS,
            )
            out_THV[tile.tokens_NQ[tile.is_real_NQ]] = attended_NHQV.transpose(1, 2)[tile.is_real_NQ]
        return out_THV


def _places(span: Span) -> range:
    return range(span.start, span.stop)


def _tiles(spans: Sequence[Span], width: int, block_size: int, device: torch.device) -> list[_Tile]:
    """Cut spans in tiles of `width` positions; those that are the same number of tiles away from 0 are one."""
    offsets = offsets_of([len(_places(span)) for span in spans]).tolist()
    members: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        for tile in range(span.start // width, (span.stop - 1) // width + 1):
            members.setdefault(tile, []).append(number)
    tiles = []
    for tile, numbers in members.items():
        num_blocks = -(-(tile + 1) * width // block_size)
        positions_Q = torch.arange(tile * width, (tile + 1) * width)
        starts_N1, stops_N1, offsets_N1 = (
            torch.tensor([[value] for value in values])
            for values in zip(*((spans[i].start, spans[i].stop, offsets[i]) for i in numbers), strict=True)
        )
        tokens_NQ = offsets_N1 + positions_Q.clamp(starts_N1, stops_N1 - 1) - starts_N1
        padding = [SCRATCH_BLOCK] * num_blocks
        tables = [[*spans[i].table, *padding][:num_blocks] for i in numbers]
        tiles.append(
            _Tile(
                tokens_NQ.to(device),
                torch.tensor(tables, device=device),
                ((positions_Q >= starts_N1) & (positions_Q < stops_N1)).to(device),
                (torch.arange(num_blocks * block_size) <= positions_Q[:, None]).to(device),
            )
        )
    return tiles
