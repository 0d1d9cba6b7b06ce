"""Attention over the paged cache: for one new token per row, and for prompt chunks.

Shape letters: `T` packed tokens, `B` rows, `C` blocks of a table, `S` cached positions, `H` query heads, `J` key and
value heads, `F` query heads that share one, `K` head size of queries and keys, `U` head size of values, `Q` queries of
a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spmdrl.engines.generation.native.paged import SCRATCH_BLOCK, LayerState, PagedCache, SlotStore, StateCache
from spmdrl.engines.generation.native.running_rows import Tables
from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.delta import last_columns
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.nouns.batch import offsets_of

# Queries per tile: short enough for short prompts not to be mostly padding, long enough for few attention calls.
# Kinds of device without an entry don't cut rows that begin at position 0.
WHOLE_ROW_TILES = {"cpu": 32}
_LATER_TILE = 128
# Positions before this attend one by one where blocks are read where they lie: tiles of short prompts are mostly
# padding. Whole tiles.
ONE_BY_ONE = {"cpu": 64}


class DecodeAttention:
    """Attend from one new token per row to its cached positions, the new one included; an `Attend`.

    Shapes don't depend on the content of tables or lengths.
    """

    def __init__(self, cache: StateCache, tables: Sequence[Tensor], lengths_B: Tensor):
        """Row b has `lengths_B`[b] positions, the new token's included, and a table of each kind of state, [B, C]; all
        are int32 on the cache's device."""
        self._cache = cache
        self._tables = tables
        self._lengths_B = lengths_B.contiguous()
        size, newest_B = cache.block_size, lengths_B.to(torch.int64) - 1
        self._head_places = _HeadPlaces(
            [
                tables_BC[:, 0].to(torch.int64)
                if kind.is_slot
                else tables_BC.gather(1, (newest_B // size)[:, None]).squeeze(1) * size + newest_B % size
                for kind, tables_BC in zip(cache.kinds, tables, strict=True)
            ]
        )

    @classmethod
    def of_rows(cls, cache: StateCache, tables: Sequence[Tables], lengths: Sequence[int]) -> DecodeAttention:
        padded = [_padded([of_row[place] for of_row in tables], cache.device) for place in range(len(cache.kinds))]
        return cls(cache, padded, torch.tensor(lengths, dtype=torch.int32, device=cache.device))

    def __call__(
        self,
        layer: int,
        q_BHK: Tensor,
        k_BJK: Tensor,
        v_BJU: Tensor,
        *,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        store, number, kind = state = self._cache.layer(layer)
        assert isinstance(store, PagedCache), f"layer {layer} keeps no keys"
        store.write(number, self._head_places.of(state), k_BJK, v_BJU)
        return ops.paged_attention(q_BHK, *store.stored(number), self._tables[kind], self._lengths_B, window, sinks_H)

    def convolve(self, layer: int, values_BC: Tensor, weight_CW: Tensor) -> Tensor:
        store, number, kind = self._cache.layer(layer)
        assert isinstance(store, SlotStore), f"layer {layer} keeps no recurrent state"
        return ops.conv_step(values_BC, weight_CW, store.columns(number), self._head_places.slots(kind))

    def recur(
        self, layer: int, q_BGK: Tensor, k_BGK: Tensor, v_BHU: Tensor, log_decay_BH: Tensor, beta_BH: Tensor
    ) -> Tensor:
        store, number, kind = self._cache.layer(layer)
        assert isinstance(store, SlotStore), f"layer {layer} keeps no recurrent state"
        slots_B = self._head_places.slots(kind)
        return ops.gated_delta_step(q_BGK, k_BGK, v_BHU, log_decay_BH, beta_BH, store.matrices(number), slots_B)


class _HeadPlaces:
    """Places of new tokens in each store."""

    def __init__(self, places: Sequence[Tensor]):
        """Places [T] of the tokens by kind of state, or slots of the rows."""
        self._places = places
        self._found: dict[PagedCache, Tensor] = {}

    def of(self, state: LayerState) -> Tensor:
        """Return the places of the tokens' heads."""
        store = state.store
        assert isinstance(store, PagedCache), "slots have no heads"
        if store not in self._found:
            self._found[store] = store.head_places(self._places[state.kind])
        return self._found[store]

    def slots(self, kind: int) -> Tensor:
        """Return the rows' slots, int64."""
        return self._places[kind]


def _padded(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return tables [B, C] of equal width, int32."""
    width = max(map(len, tables))
    padded = [[*table, *[SCRATCH_BLOCK] * (width - len(table))] for table in tables]
    return torch.tensor(padded, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Span:
    """Positions [start, stop) of one row, whose blocks hold all earlier ones that they see."""

    tables: Tables
    start: int
    stop: int


class RowSpan(NamedTuple):
    """A span and its blocks of one kind."""

    table: Sequence[int]
    start: int
    stop: int


@dataclass(frozen=True)
class _Tile:
    """A tile at the same place in several rows."""

    tokens_BQ: Tensor
    """Packed index of each query's token; any token for queries without one."""
    tables_BC: Tensor
    own_slots: Tensor
    """Queries, of [B x Q], with a token of their own."""
    own_tokens: Tensor
    """The token of each such query."""
    mask_QS: Tensor


class PrefillAttention:
    """Write the keys and values of packed spans into the cache and attend from them; an `Attend`.

    On a CPU a row's first tokens attend like decoded ones, in the exact mode all of them; later ones are cut in tiles
    at fixed positions, and a tile always meets the keys up to its own end. So a token's attention has the same rounding
    however its row is cut in spans and whatever is computed beside it.
    """

    def __init__(self, cache: StateCache, spans: Sequence[Span]):
        self._cache = cache
        size = cache.block_size
        places = [
            [span.tables[kind][0] for span in spans]
            if cache.kinds[kind].is_slot
            else [span.tables[kind][place // size] * size + place % size for span in spans for place in _places(span)]
            for kind in range(len(cache.kinds))
        ]
        self._rows = PackedRows(offsets_of([len(_places(span)) for span in spans]))
        self._begins_B = torch.tensor([span.start == 0 for span in spans], device=cache.device)
        self._head_places = _HeadPlaces([torch.tensor(of_kind, device=cache.device) for of_kind in places])
        self._tiles: list[list[_Tile]] = [[] for _ in cache.kinds]
        self._first: list[_FirstTokens | None] = [None for _ in cache.kinds]
        self._attend_whole: PackedCausalAttention | None = None
        width = WHOLE_ROW_TILES.get(cache.device.type)
        if width is None and not any(span.start for span in spans):
            self._attend_whole = PackedCausalAttention(offsets_of([span.stop for span in spans]))
            return
        num_first = 0
        reads_once = ops.reads_pages_of_a_row_once(cache.device)
        if reads_once:
            num_first = max(span.stop for span in spans)
        elif ops.reads_pages(cache.device, cache.dtype):
            num_first = ONE_BY_ONE.get(cache.device.type, 0)
        for kind in range(len(cache.kinds)):
            if cache.kinds[kind].is_slot:
                continue
            rows = [RowSpan(span.tables[kind], span.start, span.stop) for span in spans]
            self._first[kind] = _FirstTokens.of(rows, num_first, cache.device)
            if not reads_once:
                tiles = TileShape(width or _LATER_TILE, size, num_first, cache.kinds[kind].window)
                self._tiles[kind] = _tiles(rows, tiles, cache.device)

    def __call__(
        self,
        layer: int,
        q_THK: Tensor,
        k_TJK: Tensor,
        v_TJU: Tensor,
        *,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        store, number, kind = state = self._cache.layer(layer)
        assert isinstance(store, PagedCache), f"layer {layer} keeps no keys"
        store.write(number, self._head_places.of(state), k_TJK, v_TJU)
        if self._attend_whole is not None:
            return self._attend_whole(layer, q_THK, k_TJK, v_TJU, window=window, sinks_H=sinks_H)
        out_THU = q_THK.new_empty(*q_THK.shape[:2], v_TJU.shape[-1])
        first = self._first[kind]
        if first is not None:
            q_BHK = q_THK.index_select(0, first.tokens_B)
            stored = store.stored(number)
            attended_BHU = ops.paged_attention(q_BHK, *stored, first.tables_BC, first.lengths_B, window, sinks_H)
            out_THU.index_copy_(0, first.tokens_B, attended_BHU)
        for tile in self._tiles[kind]:
            # Read after all is written: rows may share blocks that this forward fills.
            keys_BSJK, values_BSJU = store.read(number, tile.tables_BC)
            attended_BHQU = ops.masked_attention(
                q_THK[tile.tokens_BQ].transpose(1, 2),
                keys_BSJK.transpose(1, 2),
                values_BSJU.transpose(1, 2),
                tile.mask_QS,
                sinks_H,
            )
            out_THU[tile.own_tokens] = attended_BHQU.transpose(1, 2).flatten(0, 1)[tile.own_slots]
        return out_THU

    def convolve(self, layer: int, values_TC: Tensor, weight_CW: Tensor) -> Tensor:
        store, number, kind = self._cache.layer(layer)
        assert isinstance(store, SlotStore), f"layer {layer} keeps no recurrent state"
        columns_SWC, slots_B = store.columns(number), self._head_places.slots(kind)
        before_BWC = self._unless_first(columns_SWC[slots_B])
        columns_SWC[slots_B] = last_columns(values_TC, self._rows, columns_SWC.shape[1], before_BWC)
        return ops.causal_conv(values_TC, weight_CW, self._rows, before_BWC)

    def recur(
        self, layer: int, q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        store, number, kind = self._cache.layer(layer)
        assert isinstance(store, SlotStore), f"layer {layer} keeps no recurrent state"
        matrices_SHKU, slots_B = store.matrices(number), self._head_places.slots(kind)
        before_BHKU = self._unless_first(matrices_SHKU[slots_B])
        out_THU, matrices_SHKU[slots_B] = ops.gated_delta(
            q_TGK, k_TGK, v_THU, log_decay_TH, beta_TH, self._rows, before_BHKU
        )
        return out_THU

    def _unless_first(self, states: Tensor) -> Tensor:
        """Return the states before each span: zeros before a row's first token, whatever its slot holds."""
        return states.masked_fill_(self._begins_B.view(-1, *[1] * (states.ndim - 1)), 0)


@dataclass(frozen=True)
class _FirstTokens:
    """Tokens that attend one by one."""

    tokens_B: Tensor
    """Packed indexes of the tokens."""
    tables_BC: Tensor
    lengths_B: Tensor

    @classmethod
    def of(cls, spans: Sequence[RowSpan], num_first: int, device: torch.device) -> _FirstTokens | None:
        """Select the tokens at the first positions of rows; None without any."""
        offsets = offsets_of([len(_places(span)) for span in spans]).tolist()
        places = [range(span.start, min(span.stop, num_first)) for span in spans]
        tokens = [
            token for start, own in zip(offsets, places, strict=False) for token in range(start, start + len(own))
        ]
        if not tokens:
            return None
        width = max(len(span.table) for span, own in zip(spans, places, strict=True) if own)
        tables = [[*span.table, *[SCRATCH_BLOCK] * (width - len(span.table))][:width] for span in spans]
        counts = torch.tensor([len(own) for own in places])
        return cls(
            torch.tensor(tokens, device=device),
            torch.tensor(tables, dtype=torch.int32).repeat_interleave(counts, dim=0).to(device),
            torch.tensor([place + 1 for own in places for place in own], dtype=torch.int32, device=device),
        )


def _places(span: Span | RowSpan) -> range:
    return range(span.start, span.stop)


@dataclass(frozen=True)
class TileShape:
    """Cut of rows in tiles."""

    width: int
    """Positions of a tile."""
    block_size: int
    start: int
    """Position of the first tile."""
    window: int | None
    """Newest positions that a token sees."""


def _tiles(spans: Sequence[RowSpan], shape: TileShape, device: torch.device) -> list[_Tile]:
    """Cut spans in tiles; those at the same place in several rows are joined."""
    width, block_size, window = shape.width, shape.block_size, shape.window
    offsets = offsets_of([len(_places(span)) for span in spans]).tolist()
    members: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        for tile in range(max(span.start, shape.start) // width, (span.stop - 1) // width + 1):
            members.setdefault(tile, []).append(number)
    tiles = []
    for tile, numbers in members.items():
        num_blocks = -(-(tile + 1) * width // block_size)
        # Blocks before the first token's window are left out.
        first = 0 if window is None else max(0, tile * width - window + 1) // block_size
        positions_Q = torch.arange(tile * width, (tile + 1) * width)
        starts_B1, stops_B1, offsets_B1 = (
            torch.tensor([[value] for value in values])
            for values in zip(*((spans[i].start, spans[i].stop, offsets[i]) for i in numbers), strict=True)
        )
        tokens_BQ = offsets_B1 + positions_Q.clamp(starts_B1, stops_B1 - 1) - starts_B1
        # On the host: a device would wait in every layer to count them.
        own_slots = ((positions_Q >= starts_B1) & (positions_Q < stops_B1)).flatten().nonzero().squeeze(1)
        padding = [SCRATCH_BLOCK] * num_blocks
        tables = [[*spans[i].table, *padding][first:num_blocks] for i in numbers]
        positions_S = torch.arange(first * block_size, num_blocks * block_size)
        mask_QS = positions_S <= positions_Q[:, None]
        if window is not None:
            mask_QS &= positions_S > positions_Q[:, None] - window
        tiles.append(
            _Tile(
                tokens_BQ.to(device),
                torch.tensor(tables, device=device),
                own_slots.to(device),
                tokens_BQ.flatten()[own_slots].to(device),
                mask_QS.to(device),
            )
        )
    return tiles
