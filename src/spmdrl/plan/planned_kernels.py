"""Rows of the operation table for a planned device: the kernels that a GPU would run, by their shapes.

PyTorch's own kernels have rules of shapes. Those in Triton have none, so others that allocate, read and write as many
bytes stand for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import delta, ops, plain
from spmdrl.engines.models.kernels.packed import Window
from spmdrl.engines.parallel.expert_parallel import AllToAllDispatch, Trip
from spmdrl.plan.account import ATTENDED, WORKED
from spmdrl.plan.planned_device import NAME


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return heads.neg()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.neg(), None, None


def _exponential_sums(logits_CV: Tensor, highest_C: Tensor) -> tuple[Tensor, Tensor]:
    logits_CV.sub_(highest_C[:, None])
    return torch.empty_like(highest_C), torch.empty_like(highest_C)


def _minus_expected(above_CV: Tensor, *_: Any) -> Tensor:
    return above_CV.neg_()


def _invert_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    return weights_BV.argmax(-1)


# Shapes of operators that nothing computes.
torch.library.define(ATTENDED, "(Tensor q_BHK, Tensor keys, Tensor values, int? window) -> Tensor")
torch.library.register_fake(
    ATTENDED, lambda q_BHK, keys, values, window: q_BHK.new_empty(*q_BHK.shape[:2], values.shape[-1])
)
torch.library.define(WORKED, "(Tensor at, int flops, int num_bytes, int launches, int product_bytes) -> ()")
torch.library.register_fake(WORKED, lambda *_: None)


def _paged_attention(
    q_BHK: Tensor, keys: Tensor, values: Tensor, tables_BC: Tensor, lengths_B: Tensor, window: Window, *_: Any
) -> Tensor:  # fmt: skip
    return cast(Tensor, torch.ops.planned.paged_attention(q_BHK, keys, values, window))


_PLAIN_STEPS, _FEW_STEPS = delta.step_through, 4


class _Stepped(torch.autograd.Function):
    """Results of the steps from chunk to chunk, and their work."""

    @staticmethod
    def forward(
        ctx: Any, fresh: Tensor, reads: Tensor, writes: Tensor, whole: Tensor, before: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(fresh, reads, writes, whole)
        ctx.set_materialize_grads(False)
        ctx.before, ctx.counts = before.shape, counts
        states = before.new_empty(len(fresh), *before.shape[1:])
        flops, moved = 4 * reads.numel() * fresh.shape[-1], 2 * (fresh.nbytes + reads.nbytes + states.nbytes)
        torch.ops.planned.worked(fresh, flops, moved + 3 * fresh.nbytes + 5 * states.nbytes, 5 * len(counts), moved)
        return states, torch.empty_like(fresh), torch.empty_like(before)

    @staticmethod
    def backward(ctx: Any, *by_made: Tensor | None) -> tuple[Tensor | None, ...]:
        fresh, reads, writes, whole = ctx.saved_tensors
        counts, is_first, is_last = ctx.counts, not ctx.needs_input_grad[4], by_made[2] is None
        state = math.prod(ctx.before[1:]) * whole.element_size() * len(fresh)
        # Shares of chunks whose next state has a gradient, and whose own needs one.
        later, earlier = 1 - is_last * counts[-1] / len(fresh), 1 - is_first * counts[0] / len(fresh)
        products = 1 + 2 * later + earlier
        flops = round(products * 2 * reads.numel() * fresh.shape[-1])
        moved = round(products * (fresh.nbytes + reads.nbytes + state))
        others = round((2 + 3 * later) * fresh.nbytes + (11 * later + 8 * earlier - 5) * state)
        launches = (12 + is_last) * len(counts) - 7 * is_last - 4 * is_first
        torch.ops.planned.worked(fresh, flops, moved + others, launches, moved)
        by_given = map(torch.empty_like, (fresh, reads, writes, whole))
        return *by_given, None if is_first else fresh.new_empty(ctx.before), None


class _Joined(torch.autograd.Function):
    """All chunks' tensors in one, while autograd keeps each."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        ctx.save_for_backward(parts)
        return parts.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(*ctx.saved_tensors)


def _step_through(
    fresh: Tensor, reads: Tensor, writes: Tensor, whole: Tensor, state: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Stand for `delta.step_through`, whose loop takes minutes on long rows; exact for rows of one length."""
    if len(counts) <= _FEW_STEPS or fresh.device.type != NAME:
        return _PLAIN_STEPS(fresh, reads, writes, whole, state, counts)
    # Of one part each, as gradients of parts are joined.
    parts = [x.split(len(x))[0] for x in (fresh, reads, writes, whole)]
    states, written, after = _Stepped.apply(*parts, state, counts)
    return _Joined.apply(states), _Joined.apply(written), after.clone()


def _evenly(grouped_linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the product of groups that have equally many rows each, as some kernels read their sizes."""

    def call(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
        sizes = torch.tensor(_even_counts(len(rows_MD), len(weights_EOD)), device=counts_E.device)
        return grouped_linear(rows_MD, weights_EOD, sizes)

    return call


def _even_counts(total: int, num_parts: int) -> list[int]:
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]


def _even_trip(
    dispatch: AllToAllDispatch, expert_TC: Tensor, here_TC: Tensor, travels_TA: Tensor, num_held: int
) -> Trip:
    """Return the counts if tokens choose among all experts evenly and independently."""
    size, (num_tokens, num_chosen) = dispatch.axis.size, expert_TC.shape
    num_experts = size * dispatch.columns * num_held
    # Experts here that a token's choices all miss, one after another.
    missed = math.prod((num_experts - num_held - place) / (num_experts - place) for place in range(num_chosen))
    sent = [round(num_tokens * (1 - missed))] * size
    num_pairs = num_tokens * num_chosen // dispatch.columns
    counts_E = torch.tensor(_even_counts(num_pairs, num_held), device=expert_TC.device)
    return Trip(sent, sent, num_pairs, counts_E)


_IN_TRITON: dict[str, Callable[..., Any]] = {
    "rotate": _Rotated.apply,
    "swiglu": torch.mul,
    "exponential_sums": _exponential_sums,
    "minus_expected": _minus_expected,
    "invert_cdf": _invert_cdf,
    "paged_attention": _paged_attention,
}


def take_kernels_of(kind: str) -> None:
    """Let the planned device run the operations of a kind of device, or the plain ones where it has none.

    A CPU's are compiled and read values, so plain ones stand for them too.
    """
    for name, row in ops.TABLE.items():
        row[NAME] = row[kind] if kind in row and kind != "cpu" else getattr(plain, name)
        if kind == "cuda" and name in _IN_TRITON:
            row[NAME] = _IN_TRITON[name]
    delta.step_through = _step_through
    route_evenly()


def route_evenly() -> None:
    """Let the planned device's experts get equally many tokens, whose choices have no values there."""
    row = ops.TABLE["grouped_linear"]
    row[NAME] = _evenly(row[NAME])
    AllToAllDispatch.agree = _even_trip  # type: ignore[method-assign,assignment]
