"""States handed from piece to piece of rows that several ranks hold, without a collective: the caller gathers.

What a piece makes of the state before it is S -> A S + B, whatever that state is. So ranks compute these at once, and
the states before their pieces from all ranks' A and B, instead of waiting for each other.

Shape letters: those of `kernels/delta.py`, and `P` pieces on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels.delta import LARGEST_CHUNK, Chunks, no_states
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.engines.models.kernels.prefixed import Copies, copy_rows
from spmdrl.resources.device import to_device


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
