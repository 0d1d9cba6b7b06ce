"""The sparse feed-forward layer: a router sends each token to a few of many experts (Qwen3-MoE, DeepSeek-V3).

A `Dispatch` brings tokens to their experts: here, in this process; replaced from outside if experts are spread over
ranks. A `Route` can record, replay or replace the choice of experts.

Shape letters: `T` packed tokens, `D` model width, `E` experts, `C` chosen experts of a token, `I` width of an expert,
`M` rows of the experts' input, one per token and chosen expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.layers import FeedForward, Linear
from spmdrl.nouns.settings.model_sizes import ClampedGate, MoeConfig


class Route(Protocol):
    """Observer, and perhaps replacement, of each sparse layer's routing."""

    def __call__(self, layer: int, scores_TE: Tensor, chosen_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the affinities and the experts to use; it may record, replay, or attach a loss to the affinities."""
        ...


Compute = Callable[[Tensor, Tensor], Tensor]
"""From rows [M, D] sorted by expert and the number of rows of each expert [E] to the experts' outputs [M, D]."""


class Dispatch(Protocol):
    """Way of tokens to their experts, and of the weighted outputs back."""

    def __call__(
        self, hidden_TD: Tensor, chosen_TC: Tensor, weights_TC: Tensor, num_experts: int, compute: Compute
    ) -> Tensor:
        """Return the weighted sum [T, D] of each token's experts; calls `compute` once, for the experts held here."""
        ...


# Each row has one place, so both directions of both passes are gathers: no scatter-add, no order of summation.
class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, order_M: Tensor, place_TC: Tensor) -> Tensor:
        ctx.save_for_backward(place_TC)
        return hidden_TD.index_select(0, order_M // place_TC.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, None, None]:
        (place_TC,) = ctx.saved_tensors
        return gradient_MD.index_select(0, place_TC.flatten()).unflatten(0, place_TC.shape).sum(1), None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, order_M: Tensor, place_TC: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return rows_MD.index_select(0, place_TC.flatten()).unflatten(0, place_TC.shape)

    @staticmethod
    def backward(ctx: Any, gradient_TCD: Tensor) -> tuple[Tensor, None, None]:
        (order_M,) = ctx.saved_tensors
        return gradient_TCD.flatten(0, 1).index_select(0, order_M), None, None


class LocalDispatch:
    """Dispatch if all experts are here: tokens are only sorted by expert; a `Dispatch`."""

    def __call__(
        self, hidden_TD: Tensor, chosen_TC: Tensor, weights_TC: Tensor, num_experts: int, compute: Compute
    ) -> Tensor:
        expert_M = chosen_TC.flatten()
        order_M = expert_M.argsort(stable=True)
        places = torch.arange(len(order_M), device=order_M.device)
        place_TC = torch.empty_like(order_M).scatter_(0, order_M, places).view_as(chosen_TC)
        # Not bincount, which waits for the device.
        counts_E = expert_M.new_zeros(num_experts).scatter_add_(0, expert_M, torch.ones_like(expert_M))
        rows_MD = compute(_ToExperts.apply(hidden_TD, order_M, place_TC), counts_E)
        outputs_TCD = _FromExperts.apply(rows_MD, order_M, place_TC)
        return torch.bmm(weights_TC[:, None].to(outputs_TCD.dtype), outputs_TCD).squeeze(1)


class Router(nn.Module):
    """Affinities of tokens to experts, and the choice among them, in float32."""

    e_score_correction_bias: Tensor | None

    def __init__(self, hidden_size: int, config: MoeConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.bias else None
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if config.scoring == "sigmoid" else None
        self.register_buffer("e_score_correction_bias", bias_E)

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the affinities [T, E] and the chosen experts [T, C]."""
        bias_E = None if self.bias is None else self.bias.to(torch.float32)
        products_TE = ops.linear(hidden_TD.to(torch.float32), self.weight.to(torch.float32), bias_E)
        scores_TE = products_TE.softmax(-1) if self.config.scoring == "softmax" else ops.sigmoid(products_TE)
        return scores_TE, self._choose(scores_TE.detach())

    def weigh(self, scores_TE: Tensor, chosen_TC: Tensor) -> Tensor:
        """Return the weights [T, C] of the chosen experts; their gradient goes to the affinities."""
        weights_TC = scores_TE.gather(1, chosen_TC)
        if self.config.normalize:
            weights_TC = weights_TC / (weights_TC.sum(-1, keepdim=True) + 1e-20)
        return weights_TC * self.config.weight_scale

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the best experts by affinity and bias, within each token's best groups (arXiv:2412.19437, eq. 16)."""
        if self.e_score_correction_bias is not None:
            scores_TE = scores_TE + self.e_score_correction_bias
        if self.config.is_group_limited:
            by_group = scores_TE.unflatten(-1, (self.config.num_groups, -1))
            group_scores = by_group.topk(2, dim=-1).values.sum(-1)
            best_groups = group_scores.topk(self.config.groups_per_token, dim=-1).indices
            is_left_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best_groups, value=False)
            scores_TE = by_group.masked_fill(is_left_out[..., None], float("-inf")).flatten(-2)
        return scores_TE.topk(self.config.experts_per_token, dim=-1).indices


class Experts(nn.Module):
    """Weights of all experts of a layer, stacked; files hold them one expert at a time."""

    dispatch: Dispatch
    gate_proj_bias: Tensor | None
    up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None

    def __init__(self, hidden_size: int, config: MoeConfig):
        super().__init__()
        num_experts, width = config.num_experts, config.intermediate_size
        self.num_experts = num_experts
        """Number of experts of the layer, wherever they are held."""
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, width))
        # After all weights, as every layer's are in that order.
        for name, size in (("gate_proj", width), ("up_proj", width), ("down_proj", hidden_size)):
            bias_EO = nn.Parameter(torch.empty(num_experts, size)) if config.bias else None
            self.register_parameter(f"{name}_bias", bias_EO)
        self.clamp = config.clamp
        self.num_bias_shares = 1
        """Number of ranks that sum their outputs, each with its share of the last bias."""
        self.dispatch = LocalDispatch()

    def forward(self, hidden_TD: Tensor, chosen_TC: Tensor, weights_TC: Tensor) -> Tensor:
        return self.dispatch(hidden_TD, chosen_TC, weights_TC, self.num_experts, self.compute)

    def compute(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Return the outputs [M, D] of the experts held here, a `Compute`."""
        gate_MI = _with_bias(ops.grouped_linear(rows_MD, self.gate_proj, counts_E), self.gate_proj_bias, counts_E)
        up_MI = _with_bias(ops.grouped_linear(rows_MD, self.up_proj, counts_E), self.up_proj_bias, counts_E)
        gated_MI = ops.swiglu(gate_MI, up_MI) if self.clamp is None else _clamped_swiglu(gate_MI, up_MI, self.clamp)
        out_MD = ops.grouped_linear(gated_MI, self.down_proj, counts_E)
        bias_ED = self.down_proj_bias
        return _with_bias(out_MD, None if bias_ED is None else bias_ED / self.num_bias_shares, counts_E)


def _with_bias(rows_MO: Tensor, bias_EO: Tensor | None, counts_E: Tensor) -> Tensor:
    """Add each expert's bias to its own rows."""
    if bias_EO is None:
        return rows_MO
    counts_E = counts_E.to(rows_MO.device)
    return rows_MO + bias_EO.repeat_interleave(counts_E, dim=0, output_size=len(rows_MO))


def _clamped_swiglu(gate_MI: Tensor, up_MI: Tensor, clamp: ClampedGate) -> Tensor:
    gate_MI, up_MI = gate_MI.clamp(max=clamp.limit), up_MI.clamp(-clamp.limit, clamp.limit)
    return (up_MI + 1) * (gate_MI * ops.sigmoid(gate_MI * clamp.alpha))


class SparseFeedForward(nn.Module):
    """The experts that each token chooses, and those that all tokens share, if any."""

    def __init__(self, hidden_size: int, config: MoeConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.gate = Router(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        self.shared_experts = FeedForward(hidden_size, config.shared_width) if config.shared_width else None
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False) if config.shared_gate else None

    def forward(self, hidden_TD: Tensor, route: Route | None = None) -> Tensor:
        out_TD = self.routed(hidden_TD, route)
        if self.shared_experts is None:
            return out_TD
        shared_TD = self.shared_experts(hidden_TD)
        if self.shared_expert_gate is not None:
            shared_TD = shared_TD * ops.sigmoid(self.shared_expert_gate(hidden_TD))
        return out_TD + shared_TD

    def routed(self, hidden_TD: Tensor, route: Route | None) -> Tensor:
        """Return the weighted sum [T, D] of each token's experts."""
        scores_TE, chosen_TC = self.gate(hidden_TD)
        if route is not None:
            scores_TE, chosen_TC = route(self.layer, scores_TE, chosen_TC)
        return self.experts(hidden_TD, chosen_TC, self.gate.weigh(scores_TE, chosen_TC))
