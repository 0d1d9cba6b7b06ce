"""Recurrence over tokens that context ranks share: each rank receives what rows before its pieces leave behind.

What a piece makes of the state before it is S -> A S + B, whatever that state is. So a rank computes A and B of its own
pieces, all ranks gather them, and the states before its pieces follow by a scan: no rank waits for the one before it.

Shape letters: `T` this rank's tokens, `P` pieces of all ranks, `C` channels and `W` width of a convolution, `G` heads
of queries and keys, `H` of values, `K` and `U` their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.delta import LARGEST_CHUNK, Chunks, last_columns, no_states
from spmdrl.engines.models.kernels.packed import PackedRows, Segments
from spmdrl.engines.models.kernels.prefixed import Copies, copy_rows
from spmdrl.engines.parallel.axis_collectives import gather_rows
from spmdrl.nouns.batch import offsets_of
from spmdrl.resources.device import to_device
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


def transitions(
    k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor, pieces: PackedRows
) -> Tensor:  # fmt: skip
    """Return A [K, K] and B [K, U] of each piece and head, one beside the other: [pieces, H, K, K + U]."""
    key_size = k_TGK.shape[-1]
    # A is what becomes of the identity behind values of zero.
    values_THV = F.pad(v_THU, (key_size, 0))
    before = no_states(k_TGK, values_THV, pieces)
    if not pieces.lengths:
        # Differentiable all the same, as other ranks wait for the gather's backward.
        return before + sum(x.sum() for x in (k_TGK, v_THU, log_decay_TH, beta_TH))
    before[..., :key_size] = torch.eye(key_size, dtype=before.dtype, device=before.device)
    plan = pieces.chunks(LARGEST_CHUNK, v_THU.device)
    return Chunks.of(k_TGK, values_THV, log_decay_TH, beta_TH, plan).scan(before, plan)[2]


@dataclass(frozen=True)
class Pieces:
    """Pieces of rows in the order in which ranks hold them, equally many each."""

    lengths: Sequence[int]
    """Tokens of each piece [P], at least one"""
    predecessors: Sequence[int]
    """Number of the piece before each in its row [P], or -1"""
    own: range
    """Numbers of this rank's"""

    def states_before(self, transitions: Tensor) -> Tensor:
        """Return the state before each of this rank's pieces [own, H, K, U], from all pieces' transitions."""
        device, key_size, (first, *waves) = transitions.device, transitions.shape[-2], self._waves()
        # From the gathered, so that every rank's result depends on it, as its backward is collective.
        nothing = F.pad(transitions[..., key_size:], (0, 0, 0, 0, 0, 0, 0, 1))[-1:]
        before = [nothing.expand(len(first), -1, -1, -1)]
        places = {piece: place for place, piece in enumerate(first)}
        for wave in waves:
            predecessors = [self.predecessors[piece] for piece in wave]
            # Several rows may follow one piece.
            made = copy_rows(transitions, Copies.of(torch.tensor(predecessors)).to(device))
            among = Copies.of(torch.tensor([places[piece] for piece in predecessors])).to(device)
            before.append(made[..., :key_size] @ copy_rows(before[-1], among) + made[..., key_size:])
            places = {piece: place for place, piece in enumerate(wave)}
        order = torch.tensor([piece for wave in (first, *waves) for piece in wave]).argsort()
        return torch.cat(before).index_select(0, to_device(order[self.own.start : self.own.stop], device))

    def _waves(self) -> list[list[int]]:
        """Return the first pieces of all rows, their second, and so on."""
        waves = [[piece for piece, before in enumerate(self.predecessors) if before < 0]]
        while following := [piece for piece, before in enumerate(self.predecessors) if before in waves[-1]]:
            waves.append(following)
        return waves

    def columns_before(self, columns_PWC: Tensor) -> Tensor:
        """Return the last columns before each of this rank's pieces, from those of all pieces by themselves."""
        num = columns_PWC.shape[1]
        index = [self._columns_before(piece, num) for piece in self.own]
        copies = Copies.of(torch.tensor(index, dtype=torch.int64).flatten()).to(columns_PWC.device)
        columns = F.pad(columns_PWC.flatten(0, 1), (0, 0, 0, 1))
        return copy_rows(columns, copies).unflatten(0, (len(self.own), num))

    def _columns_before(self, piece: int, num: int) -> list[int]:
        """Return the places of the columns before a piece among all pieces', and the place behind them for zeros."""
        found: list[int] = []
        while (piece := self.predecessors[piece]) >= 0 and len(found) < num:
            wanted = min(num - len(found), self.lengths[piece])
            found = [*range((piece + 1) * num - wanted, (piece + 1) * num), *found]
        return [len(self.lengths) * num] * (num - len(found)) + found
