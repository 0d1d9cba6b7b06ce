"""What training does about the choices of routers: even loads, and replayed choices.

All of it counts real tokens only: not padding, and not the rows that a rank makes up to run as often as others.

Shape letters: `L` sparse layers of the whole model, `T` packed tokens, of a micro-batch those that this rank routes,
`B` rows of a micro-batch, `E` experts, `C` chosen experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.nouns.settings.training_config import RoutingConfig
from spmdrl.resources.mesh import Axis


def check_routing(routing: RoutingConfig, config: DecoderConfig) -> None:
    """Raise ValueError for options that this model can't follow."""
    if config.moe is None:
        for name in ("aux_loss_coefficient", "bias_update_rate", "replay"):
            value = getattr(routing, name)
            if value not in (0, "none"):
                raise ValueError(f"train.routing.{name} is {value}, but the model has no experts; leave it out")
    elif routing.bias_update_rate and config.moe.scoring != "sigmoid":
        raise ValueError(
            f"train.routing.bias_update_rate is {routing.bias_update_rate}, but {config.model_type} routers have no "
            "correction bias; set it to 0 and use train.routing.aux_loss_coefficient"
        )


def sparse_layers(config: DecoderConfig) -> tuple[int, ...]:
    """The layers that have experts."""
    if config.moe is None:
        return ()
    return tuple(layer for layer in range(config.num_layers) if layer not in config.moe.dense_layers)


def experts_of_rows(packed: Tensor, lengths_B: Tensor, config: DecoderConfig) -> Tensor:
    """Recorded choices as [T, L, C], -1 for the last token of each row, which was generated but never fed.

    `packed` holds rows one after another: of each token but the last, its experts in each sparse layer.
    """
    assert config.moe is not None, "a dense model has no choices"
    num_layers, num_choices = len(sparse_layers(config)), config.moe.experts_per_token
    num_tokens, num_rows = int(lengths_B.sum()), len(lengths_B)
    expected = (num_tokens - num_rows) * num_layers * num_choices
    if packed.numel() != expected:
        raise ValueError(
            f"{packed.numel()} recorded choices, but {num_tokens} tokens in {num_rows} rows need {expected}: "
            f"{num_choices} in each of {num_layers} sparse layers for all but the last token of each row; "
            "record them with this model"
        )
    is_fed_T = torch.ones(num_tokens, dtype=torch.bool, device=packed.device)
    is_fed_T[lengths_B.cumsum(0) - 1] = False
    experts_TLC = packed.new_full((num_tokens, num_layers, num_choices), -1)
    experts_TLC[is_fed_T] = packed.view(-1, num_layers, num_choices)
    return experts_TLC


@dataclass(frozen=True)
class RoutingScope:
    """What the routes of all micro-batches of one optimizer step share."""

    model: DecoderConfig
    routing: RoutingConfig
    num_rows: int
    """Rows of the step on all ranks together."""
    context: Axis
    tensor: Axis

    @property
    def moe(self) -> MoeConfig:
        assert self.model.moe is not None, "a dense model has no routers"
        return self.model.moe


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens of one micro-batch that this rank routes."""

    row_T: Tensor
    """The row at each place, or its segment; -1 where nothing counts: padding, made-up rows."""
    lengths_B: Tensor
    """Tokens of each row on all context ranks."""
    experts_LTC: Tensor | None = None
    """Experts to be used instead of the router's choice; its own where -1."""
    segments_BS: Tensor | None = None
    """Where rows share prompts, 1 at the segments of each row, else 0: a token counts in every row that has it."""

    @property
    def num_segments(self) -> int:
        """Rows, or the segments that they are made of."""
        return len(self.lengths_B) if self.segments_BS is None else self.segments_BS.shape[1]


@dataclass(frozen=True)
class LayerRecord:
    """Sums over this rank's real tokens in one layer; on the device."""

    counts_E: Tensor
    """Tokens that went to each expert."""
    entropy: Tensor
    """Entropies in nats of the normalized affinities."""
    aux_loss: Tensor
    """This rank's share of the balance loss, a mean over the rows of the step; 0 without a coefficient."""


class RecordingRoute:
    """Records one micro-batch's routing, attaches the balance loss, replays choices; a `Route`.

    A layer that is run again, to recompute its activations, replaces its own record.
    """

    def __init__(self, scope: RoutingScope, tokens: RoutedTokens):
        self.records: dict[int, LayerRecord] = {}
        """By layer, those run so far."""
        self._scope = scope
        self._tokens = tokens
        self._is_real_T = tokens.row_T >= 0
        # Tokens without a row count towards an extra last row: picking the others would wait for the device.
        self._row_T = tokens.row_T.where(self._is_real_T, tokens.num_segments)
        self._num_rows_T = self._is_real_T.to(torch.float32)
        """Rows that each token counts in."""
        if tokens.segments_BS is not None:
            self._num_rows_T = F.pad(tokens.segments_BS.sum(0), (0, 1)).index_select(0, self._row_T)
        self._place_of_layer = {layer: place for place, layer in enumerate(sparse_layers(scope.model))}

    def __call__(self, layer: int, scores_TE: Tensor, chosen_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Collective over the context axis where there is a balance loss."""
        chosen_TC = self._replayed(layer, chosen_TC)
        coefficient = self._scope.routing.aux_loss_coefficient
        with torch.no_grad():
            total_T1 = scores_TE.sum(-1, keepdim=True)
            affinity_TE = scores_TE / total_T1
            slope_TE = self._slopes(scores_TE) if coefficient else torch.zeros_like(scores_TE)
            aux_loss_T1 = (slope_TE * affinity_TE).sum(-1, keepdim=True)
            entropy_T = torch.special.entr(affinity_TE).sum(-1).where(self._is_real_T, 0) * self._num_rows_T
            counts_E = self._counts_per_row(chosen_TC).sum(0)
            self.records[layer] = LayerRecord(counts_E, entropy_T.sum(), aux_loss_T1.sum())
            # Through the normalization. Tensor ranks hold the same tokens, and their gradients are summed.
            by_scores_TE = (slope_TE - aux_loss_T1) / total_T1 * (coefficient / self._scope.tensor.size)
        return (_AddGradient.apply(scores_TE, by_scores_TE) if coefficient else scores_TE), chosen_TC

    def _replayed(self, layer: int, chosen_TC: Tensor) -> Tensor:
        if self._tokens.experts_LTC is None:
            return chosen_TC
        given_TC = self._tokens.experts_LTC[self._place_of_layer[layer]].to(chosen_TC.dtype)
        return given_TC.where(given_TC >= 0, chosen_TC)

    def _slopes(self, scores_TE: Tensor) -> Tensor:
        """Derivatives of the step's balance loss by the normalized affinities (arXiv:2412.19437, eq. 17 to 20).

        That is f / T of the token's row over the number of rows. As in eq. 18, f counts the experts with the best
        affinities, whatever bias, group limit or replay choose. Collective over the context axis.
        """
        moe, lengths_B1 = self._scope.moe, self._tokens.lengths_B[:, None]
        best_TC = scores_TE.topk(moe.experts_per_token, dim=-1).indices
        counts_BE = self._scope.context.sum(self._counts_per_row(best_TC))
        frequency_BE = counts_BE * (moe.num_experts / moe.experts_per_token) / lengths_B1
        slope_SE = frequency_BE / lengths_B1 / self._scope.num_rows
        if self._tokens.segments_BS is not None:
            slope_SE = self._tokens.segments_BS.T @ slope_SE
        return F.pad(slope_SE, (0, 0, 0, 1)).index_select(0, self._row_T)

    def _counts_per_row(self, experts_TC: Tensor) -> Tensor:
        """How often each row has each expert [B, E]."""
        num_segments, num_experts = self._tokens.num_segments + 1, self._scope.moe.num_experts
        cells = (self._row_T[:, None] * num_experts + experts_TC).flatten()
        counts = cells.new_zeros(num_segments * num_experts).scatter_add_(0, cells, torch.ones_like(cells))
        # What doesn't count is in the last one.
        counts_SE = counts.view(num_segments, num_experts)[:-1]
        if self._tokens.segments_BS is None:
            return counts_SE
        # Exact: a micro-batch has fewer tokens than float32 has integers.
        return (self._tokens.segments_BS @ counts_SE.to(torch.float32)).to(counts.dtype)


class _AddGradient(torch.autograd.Function):
    """The identity forward; backward adds a term of the loss to the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, by_values: Tensor) -> Tensor:
        ctx.save_for_backward(by_values)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (by_values,) = ctx.saved_tensors
        return gradient + by_values, None
