"""Rotation, SwiGLU, the head's sums and the draw of tokens in Triton: each reads its inputs once, in one launch.

PyTorch's own take up to ten launches, each of which reads and writes everything.

Shape letters: `M` rows of `N` values; others as in `ops`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Values of a program, and the heads of a token that one rotates.
_BLOCK, _MOST_HEADS = 1024, 16
# Values that a program reads at once where one goes through a whole row.
_TILE = 4096


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `ops.rotate`."""
    if torch.is_grad_enabled() and heads.requires_grad:
        return _Rotated.apply(heads, cos, sin)
    return _rotated(heads, cos, sin, 1.0)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, -1.0), None, None


def _rotated(heads_THK: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotate heads by their tokens' angles, or back if the sign is -1."""
    if heads_THK.stride(-1) != 1:
        heads_THK = heads_THK.contiguous()
    out = heads_THK.new_empty(heads_THK.shape)
    num_tokens, num_heads, size = heads_THK.shape
    lanes = min(triton.next_power_of_2(num_heads), _MOST_HEADS)
    if out.numel():
        _rotate[(num_tokens, triton.cdiv(num_heads, lanes))](
            heads_THK, cos.contiguous(), sin.contiguous(), out, sign, heads_THK.stride(0), heads_THK.stride(1),
            num_heads, size // 2, lanes, triton.next_power_of_2(size // 2),
        )  # fmt: skip
    return out


@triton.jit
def _rotate(
    heads, cos, sin, out, sign, token_stride, head_stride, num_heads,
    HALF: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    is_own = (head < num_heads) & (lane < HALF)
    place = heads + token * token_stride + head * head_stride + lane
    first = tl.load(place, mask=is_own).to(tl.float32)
    second = tl.load(place + HALF, mask=is_own).to(tl.float32)
    cosine = tl.load(cos + token * HALF + lane, mask=lane < HALF)
    sine = tl.load(sin + token * HALF + lane, mask=lane < HALF) * sign
    target = out + (token * num_heads + head) * (2 * HALF) + lane
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=is_own)
    tl.store(target + HALF, (second * cosine + first * sine).to(out.dtype.element_ty), mask=is_own)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `ops.swiglu`, rounded as by PyTorch."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _Gated.apply(gate, up)
    return _gated(*_as_rows(gate, up)).view(gate.shape)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(*_as_rows(gate, up)).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gate_MN, up_MN, gradient_MN = _as_rows(gate, up, gradient)
        by_gate, by_up = (gate_MN.new_empty(gate_MN.shape) for _ in range(2))
        if by_gate.numel():
            strides = (gate_MN.stride(0), up_MN.stride(0), gradient_MN.stride(0))
            _gate_backward[_grid(gate_MN)](
                gate_MN, up_MN, gradient_MN, by_gate, by_up, *strides, gate_MN.shape[1], _BLOCK
            )
        return by_gate.view(gate.shape), by_up.view(up.shape)


def _as_rows(*values: Tensor) -> list[Tensor]:
    """Return views or copies with two dims, the last of which is contiguous."""
    return [x if x.ndim == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1]) for x in values]


def _grid(values_MN: Tensor) -> tuple[int, int]:
    return len(values_MN), triton.cdiv(values_MN.shape[1], _BLOCK)


def _gated(gate_MN: Tensor, up_MN: Tensor) -> Tensor:
    out = gate_MN.new_empty(gate_MN.shape)
    if out.numel():
        strides = (gate_MN.stride(0), up_MN.stride(0))
        _gate[_grid(out)](gate_MN, up_MN, out, *strides, out.shape[1], _BLOCK)
    return out


@triton.jit
def _gate(gates, ups, out, gate_stride, up_stride, size, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gates + row * gate_stride + lane, mask=lane < size).to(tl.float32)
    up = tl.load(ups + row * up_stride + lane, mask=lane < size)
    activated = (gate / (1 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    tl.store(out + row * size + lane, (activated * up.to(tl.float32)).to(up.dtype), mask=lane < size)


@triton.jit
def _gate_backward(
    gates, ups, gradients, by_gates, by_ups, gate_stride, up_stride, gradient_stride, size, BLOCK: tl.constexpr
):
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gates + row * gate_stride + lane, mask=lane < size).to(tl.float32)
    up = tl.load(ups + row * up_stride + lane, mask=lane < size).to(tl.float32)
    gradient = tl.load(gradients + row * gradient_stride + lane, mask=lane < size).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    by_gate = gradient * up * share * (1 + gate * (1 - share))
    place = row * size + lane
    tl.store(by_gates + place, by_gate.to(by_gates.dtype.element_ty), mask=lane < size)
    tl.store(by_ups + place, (gradient * gate * share).to(by_ups.dtype.element_ty), mask=lane < size)


def exponential_sums(logits_CV: Tensor, highest_C: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `ops.exponential_sums`."""
    sum_C, weighted_C = (torch.empty_like(highest_C) for _ in range(2))
    if len(logits_CV):
        highest_C = highest_C.contiguous()
        _sum_exponentials[(len(logits_CV),)](
            logits_CV, highest_C, sum_C, weighted_C, logits_CV.shape[1], _TILE, num_warps=8
        )
    return sum_C, weighted_C


@triton.jit
def _sum_exponentials(logits, highest, sums, weighted, SIZE: tl.constexpr, TILE: tl.constexpr):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    most = tl.load(highest + row)
    total, mass = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, SIZE, TILE):
        place = logits + row * SIZE + start + lanes
        is_own = start + lanes < SIZE
        above = tl.load(place, mask=is_own, other=0.0) - most
        exponential = tl.where(is_own, tl.exp(above), 0.0)
        total += exponential
        # exp(-inf) * -inf would be NaN.
        mass += tl.where(exponential > 0, exponential * above, 0.0)
        tl.store(place, above, mask=is_own)
    tl.store(sums + row, tl.sum(total, 0))
    tl.store(weighted + row, tl.sum(mass, 0))


def minus_expected(
    above_CV: Tensor, log_sum_C: Tensor, entropy_C: Tensor, by_logprob_C: Tensor | None, by_entropy_C: Tensor | None
) -> Tensor:
    """Compute `ops.minus_expected`."""
    rows = [None if x is None else x.contiguous() for x in (log_sum_C, entropy_C, by_logprob_C, by_entropy_C)]
    if above_CV.numel():
        _subtract_expected[_grid(above_CV)](
            above_CV, *rows, above_CV.shape[1], by_logprob_C is not None, by_entropy_C is not None, _BLOCK
        )
    return above_CV


@triton.jit
def _subtract_expected(
    above, log_sums, entropies, by_logprobs, by_entropies, size,
    HAS_LOGPROB: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = above + row * size + lane
    logprob = tl.load(place, mask=lane < size, other=0.0) - tl.load(log_sums + row)
    factor = tl.zeros([BLOCK], tl.float32)
    if HAS_ENTROPY:
        factor += (logprob + tl.load(entropies + row)) * tl.load(by_entropies + row)
    if HAS_LOGPROB:
        factor += tl.load(by_logprobs + row)
    tl.store(place, -factor * tl.exp(logprob), mask=lane < size)


def invert_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Compute `ops.invert_cdf`; needs no other sums where kernels must be deterministic."""
    tokens_B = torch.empty(len(weights_BV), dtype=torch.int64, device=weights_BV.device)
    if len(weights_BV):
        weights_BV, targets_B = weights_BV.contiguous(), uniforms_B * weights_BV.sum(-1)
        _find_tokens[(len(weights_BV),)](weights_BV, targets_B, tokens_B, weights_BV.shape[1], _TILE, num_warps=8)
    return tokens_B


@triton.jit
def _find_tokens(weights, targets, tokens, SIZE: tl.constexpr, TILE: tl.constexpr):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    target = tl.load(targets + row)
    before, token, last, start = 0.0, SIZE, 0, 0
    while (token == SIZE) & (start < SIZE):
        weight = tl.load(weights + row * SIZE + start + lanes, mask=start + lanes < SIZE, other=0.0)
        lane = tl.where(weight > 0, start + lanes, -1)
        mass = tl.sum(weight, 0)
        if before + mass > target:
            passes = (lane >= 0) & (before + tl.cumsum(weight, 0) > target)
            token = tl.min(tl.where(passes, lane, SIZE), 0)
        # Rounding may lift the target to the total itself, beyond the last token.
        last = tl.maximum(last, tl.max(lane, 0))
        before += mass
        start += TILE
    tl.store(tokens + row, tl.where(token < SIZE, token, last).to(tl.int64))
