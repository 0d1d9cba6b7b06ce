"""Ring attention over the context axis: queries stay, keys and values go around (arXiv:2310.01889).

Each row is cut into 2C chunks, and rank c of C holds chunks c and 2C - 1 - c, so that a causal mask leaves all ranks
the same work (the zigzag order of Llama 3's training, arXiv:2407.21783, section 3.3.2). Of rank j's keys, rank c sees

    its own (j = c): both chunks, causally;

which is the same amount of work for every other rank. Within a window a chunk receives a halo instead (halo.py).

Shape letters: `T` this rank's tokens, `H` query heads, `J` key and value heads, `K` head size of queries and keys, `U`
of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spmdrl.engines.models.kernels.packed import Sinks, Window, join_sinks, sinks_backward
from spmdrl.engines.parallel.axis_collectives import RingShift
from spmdrl.engines.training.context.block_attention import Inputs, attend_rows, attend_rows_backward
from spmdrl.engines.training.context.halo import Halo
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
