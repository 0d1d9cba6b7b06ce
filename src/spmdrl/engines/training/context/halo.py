"""Attention within a window inside rows cut over the context axis: a chunk receives the keys just before it, its halo.

A ring would send every key to every rank. Within a window a chunk sees its own keys and the `window` - 1 before it, of
one earlier chunk or more; with these in front it attends like a row behind a shared prompt, on any device.

Shape letters: `B` rows, `T` this rank's tokens, `N` tokens of a rank's halos, `H` query heads, `J` key and value heads,
`K` head size of queries and keys, `U` of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.packed import Sinks
from spmdrl.engines.models.kernels.prefixed import Copies, PrefixedRows, copy_rows
from spmdrl.engines.parallel.axis_collectives import exchange_rows
from spmdrl.nouns.batch import offsets_of
from spmdrl.resources.mesh import Axis


def halo_places(chunk_lengths_B: Sequence[int], window: int, size: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ranks [N] that hold the tokens of a rank's halos, their places [N] there, and the halos' lengths.

    Halos are in the order of the rank's chunks: two of each row, whose chunks have these lengths on all ranks.
    """
    lengths_B = torch.tensor(chunk_lengths_B, dtype=torch.int64)
    ends_B2 = lengths_B[:, None] * torch.tensor([rank, 2 * size - 1 - rank])
    counts_B2 = ends_B2.clamp(max=window - 1)
    counts, row_N = counts_B2.flatten(), torch.arange(len(lengths_B)).repeat_interleave(counts_B2.sum(1))
    first = ends_B2.flatten() - counts - offsets_of(counts.tolist())[:-1]
    position_N, length_N = torch.arange(len(row_N)) + first.repeat_interleave(counts), lengths_B[row_N]
    chunk_N = position_N // length_N
    # A rank's second chunks are those of the rows' second halves, in descending order.
    is_second_N = chunk_N >= size
    ranks_N = torch.where(is_second_N, 2 * size - 1 - chunk_N, chunk_N)
    places_N = offsets_of((2 * lengths_B).tolist())[row_N] + is_second_N * length_N + position_N % length_N
    return ranks_N, places_N, counts


class Halo:
    """Exchange of the keys and values before this rank's chunks, for one micro-batch and window."""

    def __init__(self, chunk_lengths_B: Sequence[int], window: int, context: Axis, device: torch.device):
        self._window, self._context = window, context
        needs = [halo_places(chunk_lengths_B, window, context.size, rank) for rank in range(context.size)]
        sent = [places_N[ranks_N == context.rank] for ranks_N, places_N, _ in needs]
        ranks_N, _, counts = needs[context.rank]
        self._sent, self._send_counts = Copies.of(torch.cat(sent)).to(device), [len(places) for places in sent]
        self._receive_counts = ranks_N.bincount(minlength=context.size).tolist()
        # Tokens arrive in the order of their ranks.
        self._arrived = Copies.of(ranks_N.argsort(stable=True).argsort()).to(device)
        lengths = torch.tensor(chunk_lengths_B).repeat_interleave(2)
        own, halos = lengths[lengths > 0].tolist(), counts[lengths > 0]
        self._rows = PrefixedRows(offsets_of(halos.tolist()), own, range(len(own)))

    def attend(self, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, sinks_H: Sinks) -> Tensor:
        """Return the attended values [T, H, U]. Collective over the axis, forward and backward."""
        keys_values = torch.cat((k_TJK.flatten(1), v_TJU.flatten(1)), dim=-1)
        sent = copy_rows(keys_values, self._sent)
        arrived = exchange_rows(sent, self._send_counts, self._receive_counts, self._context)
        with_halo = torch.cat((copy_rows(arrived, self._arrived), keys_values))
        k, v = with_halo.split([k_TJK[0].numel(), v_TJU[0].numel()], dim=-1)
        # A halo's own results are dropped.
        num_halo = self._rows.num_first
        q = torch.cat((q_THK.new_zeros(num_halo, *q_THK.shape[1:]), q_THK))
        heads = (q, k.unflatten(-1, k_TJK.shape[1:]), v.unflatten(-1, v_TJU.shape[1:]))
        return ops.prefixed_attention(*heads, self._rows, self._window, sinks_H)[num_halo:]
