"""Ring attention over the context axis: queries stay, keys and values go around (arXiv:2310.01889).

Each row is cut into 2C chunks, and rank c of C holds chunks c and 2C - 1 - c, so that a causal mask leaves all ranks
the same work (the zigzag order of Llama 3's training, arXiv:2407.21783, section 3.3.2). Of rank j's keys, rank c sees

    its own (j = c): both chunks, causally;

which is the same amount of work for every other rank.

A ring sends every key to every rank. Within a window a chunk sees its own keys and the `window` - 1 before it, of one
earlier chunk or more: it receives just these, its halo, and with them in front it attends like a row behind a shared
prompt, on any device.

Shape letters: `B` rows, `T` this rank's tokens, `N` those of its halos, `H` query heads, `J` key and value heads, `K`
head size of queries and keys, `U` of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.packed import Sinks, Window, join_sinks, sinks_backward
from spmdrl.engines.models.kernels.prefixed import Copies, PrefixedRows, copy_rows
from spmdrl.engines.parallel.axis_collectives import RingShift, exchange_rows
from spmdrl.engines.training.context.block_attention import Inputs, attend_rows, attend_rows_backward
from spmdrl.engines.training.context.row_pairs import Places, RowPairs, as_places
from spmdrl.nouns.batch import offsets_of
from spmdrl.resources.mesh import Axis


@dataclass(frozen=True)
class RingBlock:
    """Pairs of this rank's queries and another rank's keys, with their mask."""

    queries: Places
    keys: Places
    pairs: RowPairs


@dataclass(frozen=True)
class RingPlan:
    """The three cases, by the place of the rank that the keys come from."""

    own: RingBlock
    earlier: RingBlock
    later: RingBlock

    def block(self, rank: int, source: int) -> RingBlock:
        """Return the block that `rank` computes with the keys of `source`."""
        return self.own if source == rank else self.earlier if source < rank else self.later


def plan_ring(chunk_lengths_B: Sequence[int], device: torch.device) -> RingPlan:
    """Return the plan of rows of which each rank holds two chunks of these lengths, one row after the other."""
    chunks, rows = list(chunk_lengths_B), [2 * length for length in chunk_lengths_B]
    every = slice(0, sum(rows))
    first, second = _chunk_places(chunks, device, which=0), _chunk_places(chunks, device, which=1)
    return RingPlan(
        own=RingBlock(every, every, RowPairs(rows, rows, is_causal=True, device=device)),
        earlier=RingBlock(every, first, RowPairs(rows, chunks, is_causal=False, device=device)),
        later=RingBlock(second, every, RowPairs(chunks, rows, is_causal=False, device=device)),
    )


def _chunk_places(chunk_lengths_B: Sequence[int], device: torch.device, *, which: int) -> Places:
    """Return the places of all rows' first (0) or second (1) chunks."""
    lengths, offsets = torch.tensor(chunk_lengths_B, dtype=torch.int64), offsets_of(chunk_lengths_B)
    shift = (offsets[:-1] + which * lengths).repeat_interleave(lengths)
    return as_places(torch.arange(int(offsets[-1])) + shift, device)


class RingAttention:
    """Causal attention inside rows cut over the context axis; an `Attend` of one micro-batch's chunks on this rank.

    Collective over the axis, forward and backward.
    """

    def __init__(self, chunk_lengths_B: Sequence[int], context: Axis, device: torch.device):
        assert context.size > 1, context
        self._plan, self._context = plan_ring(chunk_lengths_B, device), context
        self._chunk_lengths_B, self._longest = chunk_lengths_B, 2 * context.size * max(chunk_lengths_B, default=0)
        self._halos: dict[int, Halo] = {}

    def __call__(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, *, window: Window = None, sinks_H: Sinks = None
    ) -> Tensor:
        if window is not None and window < self._longest:
            if window not in self._halos:
                self._halos[window] = Halo(self._chunk_lengths_B, window, self._context, q_THK.device)
            return self._halos[window].attend(q_THK, k_TJK, v_TJU, sinks_H)
        return _Ring.apply(q_THK, k_TJK, v_TJU, sinks_H, self._plan, self._context)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, sinks_H: Sinks, plan: RingPlan, context: Axis
    ) -> Tensor:
        out_THU, lse_TH = _ring_forward((q_THK, k_TJK, v_TJU), plan, context)
        if sinks_H is not None:
            out_THU, lse_TH = join_sinks(out_THU, lse_TH, sinks_H)
        out_THU = out_THU.to(q_THK.dtype)
        ctx.save_for_backward(q_THK, k_TJK, v_TJU, out_THU, lse_TH, sinks_H)
        ctx.plan, ctx.context = plan, context
        return out_THU

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out_THU: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_TJK, v_TJU, out_THU, lse_TH, sinks_H = ctx.saved_tensors
        whole = (out_THU, lse_TH)
        by_inputs = _ring_backward(by_out_THU, (q_THK, k_TJK, v_TJU), whole, ctx.plan, ctx.context)
        by_sinks = None if sinks_H is None else sinks_backward(by_out_THU, whole, sinks_H)
        return *by_inputs, by_sinks, None, None


def _ring_forward(inputs: Inputs, plan: RingPlan, context: Axis) -> tuple[Tensor, Tensor]:
    """Return output in float32 or wider, and logsumexp, over the keys of all ranks."""
    q_THK, *keys_values = inputs
    out_THU, lse_TH = torch.empty(0), torch.empty(0)
    for step in range(context.size):
        # The next keys are in transfer during this computation.
        arriving = RingShift(keys_values, context) if step + 1 < context.size else None
        block = plan.block(context.rank, (context.rank - step) % context.size)
        k, v = (x[block.keys] for x in keys_values)
        out, lse = attend_rows((q_THK[block.queries], k, v), block.pairs)
        if step == 0:
            out_THU, lse_TH = out.to(torch.promote_types(out.dtype, torch.float32)), lse
        else:
            _join(out_THU, lse_TH, block.queries, out, lse)
        if arriving is not None:
            keys_values = arriving.wait()
    return out_THU, lse_TH


def _join(out_THU: Tensor, lse_TH: Tensor, queries: Places, out: Tensor, lse: Tensor) -> None:
    """Merge more keys' output and logsumexp into those of some queries, in place."""
    lse_so_far = lse_TH[queries]
    # exp(b) / (exp(a) + exp(b)), without overflow.
    share = torch.sigmoid(lse - lse_so_far)[..., None]
    out_THU[queries] = torch.lerp(out_THU[queries], out.to(out_THU.dtype), share)
    lse_TH[queries] = torch.logaddexp(lse_so_far, lse)


def _ring_backward(
    by_out_THU: Tensor, inputs: Inputs, whole: tuple[Tensor, Tensor], plan: RingPlan, context: Axis
) -> Inputs:
    """Return gradients of this rank's queries, keys and values; the latter two accumulate around the ring."""
    q_THK, *keys_values = inputs
    by_q_THK = torch.zeros_like(q_THK, dtype=torch.promote_types(q_THK.dtype, torch.float32))
    sums = [torch.zeros_like(x, dtype=by_q_THK.dtype) for x in keys_values]
    sums_arriving = None
    for step in range(context.size):
        arriving = RingShift(keys_values, context) if step + 1 < context.size else None
        block = plan.block(context.rank, (context.rank - step) % context.size)
        out, lse, by_out, q = (x[block.queries] for x in (*whole, by_out_THU, q_THK))
        k, v = (x[block.keys] for x in keys_values)
        by_q, by_k, by_v = attend_rows_backward(by_out, (q, k, v), (out, lse), block.pairs)
        by_q_THK[block.queries] += by_q
        if sums_arriving is not None:
            sums = sums_arriving.wait()
        for total, part in zip(sums, (by_k, by_v), strict=True):
            total[block.keys] += part
        # They follow their keys, and return to their rank after the last step.
        sums_arriving = RingShift(sums, context)
        if arriving is not None:
            keys_values = arriving.wait()
    assert sums_arriving is not None
    by_k, by_v = (total.to(x.dtype) for total, x in zip(sums_arriving.wait(), inputs[1:], strict=True))
    return by_q_THK.to(q_THK.dtype), by_k, by_v


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
