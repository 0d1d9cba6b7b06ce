"""Operators of prime-rl's trainer in place of ours, for plans of its memory and time.

By PrimeIntellect-ai/prime-rl of January 2026, under src/prime_rl/trainer:

- models/layers/lm_head.py: the head goes through the vocabulary in chunks, with logits of all tokens in float32. It
  adds up a gradient of its weight even if that is frozen. rl/config.py sets 2,048 entries of the vocabulary.
- models/layers/moe.py: rows of experts are gathered, weighted after the experts, and scattered back. Without adapters
  torchtitan's wrapper (torchtitan/distributed/expert_parallel.py) pads each expert's rows to a multiple of 8: it
  copies the rows with one more, gathers them padded, and writes the padded output back.
- models/layers/lora/multi_moe.py: each of an expert's three products has its adapter's beside it.
- Adapters read numbers of the device (multi_moe.py) or repeat by them (multi_linear.py), which torch.compile can't, and
  PyTorch doesn't compile parts of a checkpointed layer (torch/utils/checkpoint.py): layers with adapters run operator
  by operator.

Shape letters as in our models: `T` tokens, `D` model width, `V` vocabulary, `N` entries of a chunk of it, `E` experts,
`C` chosen experts of a token, `M` rows of experts, `I` width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.moe import Compute, Experts, LocalDispatch
from spmdrl.engines.training.heads import LogprobHead
from spmdrl.plan.planned_device import NAME

ADAPTER_RANK = 16
_VOCABULARY_CHUNK = 2048
_PADDED_TO = 8


def take_operators(*, fused_head: bool, adapters: bool) -> None:
    """Let our engines run the trainer's operators in this process."""
    if fused_head:
        LogprobHead.__call__ = _in_chunks  # type: ignore[method-assign]
    if adapters:
        ops.TABLE["swiglu"][NAME] = _swiglu
    weigh = _weighted if adapters else _Weighted.apply
    LocalDispatch.__call__ = lambda _, *given: _dispatch(weigh, *given)  # type: ignore[method-assign]
    Experts.compute = _adapted if adapters else _padded  # type: ignore[method-assign]


def _in_chunks(head: LogprobHead, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
    logprobs_T, entropies_T = _ChunkedHead.apply(hidden_TD, weight_VD)
    return logprobs_T[head.places_P], entropies_T[head.places_P]


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        highest_T = hidden_TD.new_zeros(len(hidden_TD), dtype=torch.float32)
        sum_T, weighted_T = torch.zeros_like(highest_T), torch.zeros_like(highest_T)
        for part_ND in weight_VD.split(_VOCABULARY_CHUNK):
            logits_TN = hidden_TD @ part_ND.T
            wide_TN = logits_TN.to(torch.float32).mul_(1.0)
            higher_T = torch.maximum(highest_T, wide_TN.amax(-1))
            scale_T = (highest_T - higher_T).exp()
            exponents_TN = (wide_TN - higher_T[:, None]).exp()
            sum_T = sum_T * scale_T + exponents_TN.sum(-1)
            weighted_T = weighted_T * scale_T + (exponents_TN * wide_TN).sum(-1)
            highest_T = higher_T
        normalizer_T = highest_T + sum_T.log()
        ctx.save_for_backward(hidden_TD, weight_VD, normalizer_T)
        entropies_T = normalizer_T - weighted_T / sum_T
        ctx.mark_non_differentiable(entropies_T)
        return highest_T - normalizer_T, entropies_T

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        hidden_TD, weight_VD, normalizer_T = ctx.saved_tensors
        hidden_gradient_TD, weight_gradient_VD = torch.zeros_like(hidden_TD), torch.zeros_like(weight_VD)
        chunks = zip(weight_VD.split(_VOCABULARY_CHUNK), weight_gradient_VD.split(_VOCABULARY_CHUNK), strict=True)
        for part_ND, gradient_ND in chunks:
            logits_TN = hidden_TD @ part_ND.T
            wide_TN = logits_TN.to(torch.float32).mul_(1.0)
            shares_TN = (wide_TN - normalizer_T[:, None]).exp()
            gradient_TN = -gradient_T[:, None] * shares_TN
            gradient_TN.mul_(1.0)
            hidden_gradient_TD.add_(gradient_TN.to(hidden_TD.dtype) @ part_ND)
            gradient_ND.add_(gradient_TN.to(hidden_TD.dtype).T @ hidden_TD)
        return hidden_gradient_TD, weight_gradient_VD


def _weighted(rows_MD: Tensor, weights_M: Tensor) -> Tensor:
    return (rows_MD.to(torch.float32) * weights_M[:, None]).to(rows_MD.dtype)


class _Weighted(torch.autograd.Function):
    """`_weighted` after compilation: one kernel in either direction."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weights_M: Tensor) -> Tensor:
        ctx.save_for_backward(rows_MD, weights_M)
        return torch.neg(rows_MD)

    @staticmethod
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, Tensor]:
        rows_MD, weights_M = ctx.saved_tensors
        return torch.neg(gradient_MD), weights_M.to(torch.float32)


def _dispatch(
    weigh: Callable[[Tensor, Tensor], Tensor], hidden_TD: Tensor, chosen_TC: Tensor, weights_TC: Tensor,
    num_experts: int, compute: Compute,
) -> Tensor:  # fmt: skip
    expert_M = chosen_TC.flatten()
    counts_E = expert_M.new_zeros(num_experts).scatter_add_(0, expert_M, torch.ones_like(expert_M))
    order_M = expert_M.argsort(stable=True)
    token_MD = (order_M // chosen_TC.shape[1])[:, None].expand(-1, hidden_TD.shape[1])
    out_MD = compute(hidden_TD.gather(0, token_MD), counts_E)
    weighted_MD = weigh(out_MD, weights_TC.flatten()[order_M])
    return torch.zeros_like(hidden_TD).scatter_add(0, token_MD, weighted_MD)


def _padded(experts: Experts, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
    num_rows = len(rows_MD) + _PADDED_TO * len(counts_E)
    place_M = torch.zeros(num_rows, dtype=torch.int64, device=rows_MD.device)
    padded_MD = torch.vstack((rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])))[place_M]
    gate_MI = ops.grouped_linear(padded_MD, experts.gate_proj, counts_E)
    gated_MI = ops.swiglu(gate_MI, ops.grouped_linear(padded_MD, experts.up_proj, counts_E))
    out_MD = ops.grouped_linear(gated_MI, experts.down_proj, counts_E)
    back_MD = out_MD.new_zeros(len(rows_MD) + 1, out_MD.shape[1])
    back_MD[place_M] = out_MD
    return back_MD[:-1]


def _adapted(experts: Experts, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
    gate_MI = _with_adapter(experts.gate_proj, rows_MD, counts_E)
    up_MI = _with_adapter(experts.up_proj, rows_MD, counts_E)
    return _with_adapter(experts.down_proj, _swiglu(gate_MI, up_MI), counts_E)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _with_adapter(weight_EOD: Tensor, values_MD: Tensor, counts_E: Tensor) -> Tensor:
    (num_experts, outputs, inputs), options = weight_EOD.shape, {"dtype": values_MD.dtype, "device": values_MD.device}
    a = torch.empty(num_experts, ADAPTER_RANK, inputs, requires_grad=True, **options)
    b = torch.empty(num_experts, outputs, ADAPTER_RANK, requires_grad=True, **options)
    own_MO = ops.grouped_linear(values_MD, weight_EOD, counts_E)
    return own_MO + 2.0 * ops.grouped_linear(ops.grouped_linear(values_MD, a, counts_E), b, counts_E)
