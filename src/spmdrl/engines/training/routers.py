"""Routers of sparse layers in training: balanced loads, replayed choices, and their statistics.

Only real tokens count: neither padding nor the dummy rows that equalise the number of micro-batches.

Shape letters: `L` sparse layers of the whole model, `T` packed tokens, of a micro-batch those that this rank routes,
`B` rows of a micro-batch, `E` experts, `C` chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.moe import SparseFeedForward
from spmdrl.engines.training.sharded_model import ShardedModel
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.nouns.settings.training_config import RoutingConfig
from spmdrl.resources.mesh import Axis, UpdateMesh


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
    """Return the layers that have experts."""
    if config.moe is None:
        return ()
    return tuple(layer for layer in range(config.num_layers) if layer not in config.moe.dense_layers)


def experts_of_rows(packed: Tensor, lengths_B: Tensor, config: DecoderConfig) -> Tensor:
    """Return recorded choices as [T, L, C], -1 for each row's last token, which was generated but never fed.

    `packed` holds rows one after another: for each token but the last, its experts in each sparse layer.
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
    """State shared by the routes of all micro-batches of one optimizer step."""

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
    """Tokens of one micro-batch that this rank routes."""

    row_T: Tensor
    """Row at each place, or its segment; -1 for places that don't count: padding, dummy rows."""
    lengths_B: Tensor
    """Tokens of each row on all context ranks."""
    experts_LTC: Tensor | None = None
    """Experts to use instead of the router's choice; -1 keeps the router's."""
    segments_BS: Tensor | None = None
    """1 at each row's segments, else 0, if rows share prompts: a token counts in every row that has it."""

    @property
    def num_segments(self) -> int:
        """Number of rows, or of their segments."""
        return len(self.lengths_B) if self.segments_BS is None else self.segments_BS.shape[1]


@dataclass(frozen=True)
class LayerRecord:
    """Sums over this rank's real tokens in one layer; on the device."""

    counts_E: Tensor
    """Number of tokens of each expert."""
    entropy: Tensor
    """Entropies in nats of the normalized affinities."""
    aux_loss: Tensor
    """This rank's share of the balance loss, a mean over the rows of the step; 0 without a coefficient."""


class RecordingRoute:
    """`Route` that records one micro-batch's routing, attaches the balance loss, and replays choices.

    A recomputed layer replaces its own record.
    """

    def __init__(self, scope: RoutingScope, tokens: RoutedTokens):
        self.records: dict[int, LayerRecord] = {}
        """records of the layers run so far"""
        self._scope = scope
        self._tokens = tokens
        self._is_real_T = tokens.row_T >= 0
        # Tokens without a row count towards an extra last row: selecting the others would wait for the device.
        self._row_T = tokens.row_T.where(self._is_real_T, tokens.num_segments)
        self._num_rows_T = self._is_real_T.to(torch.float32)
        """Number of rows that each token counts in."""
        if tokens.segments_BS is not None:
            self._num_rows_T = F.pad(tokens.segments_BS.sum(0), (0, 1)).index_select(0, self._row_T)
        self._place_of_layer = {layer: place for place, layer in enumerate(sparse_layers(scope.model))}

    def __call__(self, layer: int, scores_TE: Tensor, chosen_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Record and adjust one layer's routing. Collective over the context axis if there is a balance loss."""
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
        """Return derivatives of the step's balance loss by the normalized affinities (arXiv:2412.19437, eq. 17 to 20).

        That is f / T of the token's row over the number of rows. As in eq. 18, f counts the experts with the best
        affinities, regardless of bias, group limit or replay. Collective over the context axis.
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
        """Count each row's uses of each expert [B, E]."""
        num_segments, num_experts = self._tokens.num_segments + 1, self._scope.moe.num_experts
        cells = (self._row_T[:, None] * num_experts + experts_TC).flatten()
        counts = cells.new_zeros(num_segments * num_experts).scatter_add_(0, cells, torch.ones_like(cells))
        # Places that don't count are in the last row.
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


@dataclass(frozen=True)
class RouterTotals:
    """Totals of all layers' routers over an optimizer step."""

    model: DecoderConfig
    routing: RoutingConfig
    counts_LE: Tensor
    """Number of tokens of each expert of each sparse layer."""
    entropy_L: Tensor
    """Sum over tokens of the entropy of the normalized affinities, in nats."""
    aux_loss_L: Tensor
    """Balance loss without its coefficient: 1 for equal loads."""

    def metrics(self) -> dict[str, float]:
        """Return means over layers; loads are relative to the mean load of the layer."""
        assert self.model.moe is not None, "a dense model has no routers"
        loads_LE = self.counts_LE.to(torch.float32)
        mean_L = loads_LE.mean(1)
        num_tokens_L = loads_LE.sum(1) / self.model.moe.experts_per_token
        values = {
            "router/load_max_over_mean": loads_LE.amax(1) / mean_L,
            "router/load_min_over_mean": loads_LE.amin(1) / mean_L,
            "router/entropy": self.entropy_L / num_tokens_L,
        }
        if self.routing.aux_loss_coefficient:
            values["router/aux_loss"] = self.aux_loss_L
        return dict(zip(values, torch.stack([value_L.mean() for value_L in values.values()]).tolist(), strict=True))

    def update_bias(self, decoder: Decoder) -> None:
        """Raise the correction biases of experts below the mean load by the configured rate, and lower the others'.

        arXiv:2408.15664, algorithm 1. Every rank that holds a layer updates its copy identically.
        """
        place_of_layer = {layer: place for place, layer in enumerate(sparse_layers(self.model))}
        for layer, bias_E in _biases(decoder):
            counts_E = self.counts_LE[place_of_layer[layer]]
            # Sign of mean - load in integers, so that a load at the mean is exact.
            lacking_E = counts_E.sum() - counts_E * len(counts_E)
            bias_E += self.routing.bias_update_rate * lacking_E.sign()


class RouterStatistics:
    """Accumulator of the records of a step's micro-batches."""

    def __init__(self, model: DecoderConfig, routing: RoutingConfig, device: torch.device):
        assert model.moe is not None, "a dense model has no routers"
        self._model = model
        self._routing = routing
        self._place_of_layer = {layer: place for place, layer in enumerate(sparse_layers(model))}
        num_layers = len(self._place_of_layer)
        self._counts_LE = torch.zeros(num_layers, model.moe.num_experts, dtype=torch.int64, device=device)
        self._sums_L2 = torch.zeros(num_layers, 2, dtype=torch.float32, device=device)

    def add(self, route: RecordingRoute) -> None:
        """Add a finished micro-batch's records."""
        for layer, record in route.records.items():
            place = self._place_of_layer[layer]
            self._counts_LE[place] += record.counts_E
            self._sums_L2[place] += torch.stack((record.entropy, record.aux_loss))

    def balance(self, model: ShardedModel, *, is_skipped: bool) -> dict[str, tuple[float, float]]:
        """Correct the routers' biases after a step, and report the loads as (mean, 1). Collective over the mesh."""
        totals = self.totals(model.mesh)
        metrics = totals.metrics()
        if model.config.moe is not None and model.config.moe.scoring == "sigmoid":
            if self._routing.bias_update_rate and not is_skipped:
                for decoder in model.decoders:
                    totals.update_bias(decoder)
            metrics["router/bias_abs_max"] = largest_bias(model.decoders, model.mesh, self._counts_LE.device)
        return {name: (value, 1.0) for name, value in metrics.items()}

    def totals(self, mesh: UpdateMesh) -> RouterTotals:
        """Return the sums over all ranks, the same on each. Collective over the mesh."""
        counts_LE, sums_L2 = self._counts_LE, self._sums_L2
        # Not over the tensor axis, whose ranks route the same tokens. Layers that a stage doesn't hold add zeros.
        for axis in (mesh.data, mesh.context, mesh.pipeline):
            counts_LE, sums_L2 = axis.sum(counts_LE), axis.sum(sums_L2)
        return RouterTotals(self._model, self._routing, counts_LE, *sums_L2.unbind(1))


def largest_bias(decoders: Iterable[Decoder], mesh: UpdateMesh, device: torch.device) -> float:
    """Return the metric router/bias_abs_max over all layers, 0 without biases. Collective over the mesh.

    `decoders` are the parts that this rank holds.
    """
    largest = [bias_E.abs().max() for decoder in decoders for _, bias_E in _biases(decoder)]
    return float(mesh.pipeline.max(torch.stack([torch.zeros((), device=device), *largest]).max()))


def _biases(decoder: Decoder) -> Iterator[tuple[int, Tensor]]:
    """Yield the correction biases held, each with its layer."""
    for module in decoder.modules():
        if isinstance(module, SparseFeedForward) and module.gate.e_score_correction_bias is not None:
            yield module.layer, module.gate.e_score_correction_bias
