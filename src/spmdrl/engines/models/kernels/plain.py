"""Each operation in plain PyTorch: the reference in tests, and the fallback of devices without their own.

Shape letters: `T` packed tokens, `H` query heads, `J` key and value heads, `K` head size, `U` head size of values,
`F` query heads that share a key head, `B` rows, `Q` queries of a row, `S` key positions, `C` blocks of a table, `M`
rows sorted by expert, `E` experts, `D` inputs and `O` outputs of a linear layer; `C` places and `V` vocabulary of a
head, where no table of blocks is meant.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels.delta import causal_conv as causal_conv
from spmdrl.engines.models.kernels.delta import conv_step as conv_step
from spmdrl.engines.models.kernels.delta import gated_delta as gated_delta
from spmdrl.engines.models.kernels.delta import gated_delta_step as gated_delta_step
from spmdrl.engines.models.kernels.packed import (
    PackedRows,
    Sinks,
    Window,
    attend_masked,
    nothing_attended,
    pad_values,
    seen_keys,
)
from spmdrl.engines.models.kernels.prefixed import Copies, PrefixedRows
from spmdrl.nouns.batch import offsets_of

# A CPU's matrix product gives each of its rows the same bits from this number of rows on: MKL has other loops for fewer
# than 16 on processors with AVX-512 FP16, and for fewer than 4 on others.
LEAST_ROWS = 16
FLOAT_SUMS_REFUSED: tuple[str, ...] = ("cuda",)
"""Kinds of device without a deterministic cumulative sum of floating-point numbers in PyTorch."""
# The grouped product requires rows of every operand to begin at multiples of this.
_STRIDE_BYTES = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(x.to(torch.float32), x.shape[-1:], eps=eps)
    return weight * normed.to(x.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def softplus(x: Tensor) -> Tensor:
    return F.softplus(x)


def softcap(logits: Tensor, cap: float) -> Tensor:
    return logits.div_(cap).tanh_().mul_(cap)


def linear(rows_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute F.linear with the same bits for each row, however many there are."""
    lacking = LEAST_ROWS - len(rows_MD)
    if lacking <= 0 or not len(rows_MD):
        return F.linear(rows_MD, weight_OD, bias_O)
    return F.linear(F.pad(rows_MD, (0, 0, 0, lacking)), weight_OD, bias_O)[: len(rows_MD)]


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    groups = zip(rows_MD.split(counts_E.tolist()), weights_EOD.unbind(), strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in groups])


def blocked_linear(weight_OD: Tensor, bias_O: Tensor | None) -> None:
    return None


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return out.add_(a.to(out.dtype).T @ b.to(out.dtype))


def exponential_sums(logits_CV: Tensor, highest_C: Tensor) -> tuple[Tensor, Tensor]:
    above_CV = logits_CV.sub_(highest_C[:, None])
    exp_CV = above_CV.exp()
    sum_C = exp_CV.sum(-1)
    return sum_C, exp_CV.mul_(above_CV).sum(-1)


def minus_expected(
    above_CV: Tensor, log_sum_C: Tensor, entropy_C: Tensor, by_logprob_C: Tensor | None, by_entropy_C: Tensor | None
) -> Tensor:
    logprobs_CV = above_CV.sub_(log_sum_C[:, None])
    p_CV = logprobs_CV.exp()
    if by_entropy_C is None:
        assert by_logprob_C is not None, "a gradient of at least one of the two is given"
        return p_CV.mul_(-by_logprob_C[:, None])
    factor_CV = logprobs_CV.add_(entropy_C[:, None]).mul_(by_entropy_C[:, None])
    if by_logprob_C is not None:
        factor_CV.add_(by_logprob_C[:, None])
    return factor_CV.mul_(p_CV).neg_()


def invert_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    cumulated_BV = cumulated(weights_BV)
    total_B = cumulated_BV[:, -1]
    # Rounding may lift uniform x total to the total itself, beyond the last token.
    target_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    found_B = torch.searchsorted(cumulated_BV, target_B[:, None], right=True).squeeze(-1)
    # NaN compares beyond all: broken logits must raise by name, rather than fail at an index.
    return found_B.clamp(max=weights_BV.shape[-1] - 1)


def cumulated(weights_BV: Tensor) -> Tensor:
    """Return cumulative sums of each row's weights, none of which is above 1.

    If kernels must be deterministic, CUDA refuses cumulative sums of floating-point numbers, but not of integers: there
    weights are rounded to multiples of 2**-40.
    """
    if weights_BV.device.type not in FLOAT_SUMS_REFUSED or not torch.are_deterministic_algorithms_enabled():
        return weights_BV.cumsum(-1)
    sums_BV = (weights_BV * 2.0**40).to(torch.int64).cumsum(-1).to(weights_BV.dtype) * 2.0**-40
    # An integer can't be NaN, but a row's sums must be if one of its weights is.
    return sums_BV + 0 * weights_BV.sum(-1, keepdim=True)


def packed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    share = q_THK.shape[1] // k_TJK.shape[1]
    num_heads = q_THK.shape[1]
    # A column of scores behind each query's, whose weight is dropped.
    sinks_H11 = q_THK.new_empty(num_heads, 1, 0) if sinks_H is None else sinks_H.view(-1, 1, 1)
    attended = [nothing_attended(q_THK[:0], k_TJK[:0], v_TJU[:0])]
    for q, k, v in zip(*(heads.split(rows.lengths) for heads in (q_THK, k_TJK, v_TJU)), strict=True):
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        scores_HTT = torch.einsum("qhk,thk->hqt", q, k).to(torch.float32) * q.shape[-1] ** -0.5
        scores_HTT = scores_HTT.masked_fill(~seen_keys(len(q), window, q.device), -torch.inf)
        joined = torch.cat((scores_HTT, sinks_H11.to(torch.float32).expand(-1, len(q), -1)), dim=-1)
        weights_HTT = torch.softmax(joined, dim=-1)[..., : len(q)].to(v.dtype)
        attended.append(torch.einsum("hqt,thv->qhv", weights_HTT, v))
    return torch.cat(attended)


def prefixed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PrefixedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    whole = rows.whole_rows()
    tokens = Copies.of(torch.cat(whole)).to(q_THK.device)
    q, k, v = (x.index_select(0, tokens.index) for x in (q_THK, k_TJK, v_TJU))
    attended = packed_attention(q, k, v, PackedRows(offsets_of([len(row) for row in whole])), window, sinks_H)
    # The first copy of each token.
    return attended.index_select(0, tokens.rounds[0][0])


def masked_attention(q_BHQK: Tensor, k_BJSK: Tensor, v_BJSU: Tensor, mask: Tensor, sinks_H: Sinks = None) -> Tensor:
    # Fast kernels need one head size; padded values only add columns.
    sinks_H1 = None if sinks_H is None else sinks_H[:, None]
    out = attend_masked(q_BHQK, k_BJSK, pad_values(k_BJSK, v_BJSU), mask, sinks_H1)
    return out[..., : v_BJSU.shape[-1]]


def paged_attention(
    q_BHK: Tensor,
    keys: Tensor,
    values: Tensor,
    tables_BC: Tensor,
    lengths_B: Tensor,
    window: Window = None,
    sinks_H: Sinks = None,
) -> Tensor:
    (num_rows, num_blocks), (_, num_heads, block_size, _) = tables_BC.shape, keys.shape
    keys_BJSK, values_BJSU = (
        store.index_select(0, tables_BC.flatten()).view(num_rows, num_blocks, *store.shape[1:]).transpose(1, 2)
        .flatten(2, 3) for store in (keys, values)
    )  # fmt: skip
    positions_S, lengths_B1 = torch.arange(num_blocks * block_size, device=lengths_B.device), lengths_B[:, None]
    is_seen_BS = positions_S < lengths_B1
    if window is not None:
        is_seen_BS &= positions_S >= lengths_B1 - window
    # Query heads that share a key head are its queries, so that it is read once for all of them.
    q_BJFK = q_BHK.unflatten(1, (num_heads, -1))
    sinks_JF = None if sinks_H is None else sinks_H.unflatten(0, (num_heads, -1))
    values_BJSK = pad_values(keys_BJSK, values_BJSU)
    out = attend_masked(q_BJFK, keys_BJSK, values_BJSK, is_seen_BS[:, None, None], sinks_JF)
    return out[..., : values.shape[-1]].flatten(1, 2)


def grouped_mm_takes(rows_MD: Tensor, weights_EOD: Tensor) -> bool:
    """Return True if there are rows, and all strides satisfy the grouped product."""
    widths = weights_EOD.shape[1:]
    return len(rows_MD) > 0 and all(width * rows_MD.element_size() % _STRIDE_BYTES == 0 for width in widths)


def grouped_mm_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    """Apply each expert's linear layer to its own rows; returns [M, O]."""
    ends_E = counts_E.to(rows_MD.device, non_blocking=True).cumsum(0).to(torch.int32)
    product_MO = F.grouped_mm(rows_MD.contiguous(), weights_EOD.transpose(1, 2), offs=ends_E)
    return _ContiguousGradient.apply(product_MO)


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient has plain strides: the product's backward fails on others, such as a sum's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
