"""Recurrence over tokens that context ranks share: each rank receives what rows before its pieces leave behind.

A rank computes what its own pieces make of any state, all ranks gather that, and the states before its pieces follow by
a scan (`kernels/delta_pieces.py`). So no rank waits for the one before it.

Shape letters: `T` this rank's tokens, `P` pieces of all ranks, `C` channels and `W` width of a convolution, `G` heads
of queries and keys, `H` of values, `K` and `U` their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.delta import last_columns
from spmdrl.engines.models.kernels.delta_pieces import Pieces, transitions
from spmdrl.engines.models.kernels.packed import PackedRows, Segments
from spmdrl.engines.parallel.axis_collectives import gather_rows
from spmdrl.nouns.batch import offsets_of
from spmdrl.resources.mesh import Axis


@dataclass(frozen=True)
class Cut:
    """Cut of segments in pieces: runs of consecutive places that one rank holds; on the host."""

    lengths: list[int]
    ranks: list[int]
    predecessors: list[int]
    """Number of the piece before each, or -1."""

    @classmethod
    def of(cls, segments: Segments, owner: Tensor) -> Cut:
        """Cut segments of places, whose ranks are `owner` [places]; pieces are in the order of places."""
        begins = torch.zeros(int(segments.offsets[-1]), dtype=torch.bool)
        held = owner[: len(begins)]
        begins[1:] = held[1:] != held[:-1]
        begins[segments.offsets[:-1]] = True
        starts = begins.nonzero().flatten()
        firsts = torch.searchsorted(starts, torch.tensor(segments.offsets[:-1])).tolist()
        ends = [*firsts[1:], len(starts)]
        predecessors = [piece - 1 for piece in range(len(starts))]
        for first, before in zip(firsts, segments.predecessors, strict=True):
            predecessors[first] = -1 if before < 0 else ends[before] - 1
        lengths = torch.cat((starts, torch.tensor([len(begins)]))).diff()
        return cls(lengths.tolist(), held[starts].tolist(), predecessors)

    def held_by(self, rank: int) -> list[int]:
        """Return the numbers of a rank's pieces."""
        return [piece for piece, holder in enumerate(self.ranks) if holder == rank]


class HandOver:
    """Convolution and recurrence of one micro-batch's tokens on this rank. Collective over the axis, both passes."""

    def __init__(self, segments: Segments, owner: Tensor, context: Axis):
        """`owner` are the ranks [places] of all tokens; each rank's tokens are in the order of places."""
        self._context = context
        cut = Cut.of(segments, owner)
        held = [cut.held_by(rank) for rank in range(context.size)]
        self._most = max(map(len, held))
        # Ranks gather equally many: those with fewer pieces add some that none follows.
        number = {piece: rank * self._most + place for rank, own in enumerate(held) for place, piece in enumerate(own)}
        lengths, predecessors = [1] * (context.size * self._most), [-1] * (context.size * self._most)
        for piece, place in number.items():
            before = cut.predecessors[piece]
            lengths[place], predecessors[place] = cut.lengths[piece], -1 if before < 0 else number[before]
        own = held[context.rank]
        first = context.rank * self._most
        self._pieces = Pieces(lengths, predecessors, range(first, first + len(own)))
        self._rows = PackedRows(offsets_of([cut.lengths[piece] for piece in own]))

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank's pieces; padding follows them."""
        return self._rows.offsets[-1]

    def convolve(self, layer: int, values_TC: Tensor, weight_CW: Tensor) -> Tensor:
        ends = last_columns(values_TC, self._rows, weight_CW.shape[1] - 1)
        before = self._pieces.columns_before(self._gathered(ends))
        return ops.causal_conv(values_TC, weight_CW, self._rows, before)

    def recur(
        self, layer: int, q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        made = transitions(k_TGK, v_THU, log_decay_TH, beta_TH, self._rows)
        before = self._pieces.states_before(self._gathered(made))
        return ops.gated_delta(q_TGK, k_TGK, v_THU, log_decay_TH, beta_TH, self._rows, before)[0]

    def _gathered(self, values: Tensor) -> Tensor:
        """Return all ranks' values [P, ...] from this rank's."""
        lacking = self._most - len(values)
        return gather_rows(F.pad(values, (*[0, 0] * (values.ndim - 1), 0, lacking)), self._context)
