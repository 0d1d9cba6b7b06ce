"""How evenly the experts were loaded in an optimizer step, and the correction of it by biases.

Shape letters: `L` sparse layers of the whole model, `E` experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.moe import SparseFeedForward
from spmdrl.engines.training.routers import RecordingRoute, sparse_layers
from spmdrl.engines.training.sharded_model import ShardedModel
from spmdrl.nouns.settings.training_config import RoutingConfig
from spmdrl.resources.mesh import UpdateMesh


@dataclass(frozen=True)
class RouterTotals:
    """What the routers of all layers did with all tokens of an optimizer step."""

    model: DecoderConfig
    routing: RoutingConfig
    counts_LE: Tensor
    """Tokens that went to each expert of each sparse layer."""
    entropy_L: Tensor
    """Sum over tokens of the entropy of the normalized affinities, in nats."""
    aux_loss_L: Tensor
    """The balance loss without its coefficient: 1 where all experts are alike."""

    def metrics(self) -> dict[str, float]:
        """Means over layers; loads are relative to the mean load of the layer."""
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

        arXiv:2408.15664, algorithm 1. Every rank that holds a layer does the same to its copy.
        """
        place_of_layer = {layer: place for place, layer in enumerate(sparse_layers(self.model))}
        for layer, bias_E in _biases(decoder):
            counts_E = self.counts_LE[place_of_layer[layer]]
            # The sign of mean - load, in integers, so that a mean load differs from one beside it.
            lacking_E = counts_E.sum() - counts_E * len(counts_E)
            bias_E += self.routing.bias_update_rate * lacking_E.sign()


class RouterStatistics:
    """Adds up the records of a step's micro-batches."""

    def __init__(self, model: DecoderConfig, routing: RoutingConfig, device: torch.device):
        assert model.moe is not None, "a dense model has no routers"
        self._model = model
        self._routing = routing
        self._place_of_layer = {layer: place for place, layer in enumerate(sparse_layers(model))}
        num_layers = len(self._place_of_layer)
        self._counts_LE = torch.zeros(num_layers, model.moe.num_experts, dtype=torch.int64, device=device)
        self._sums_L2 = torch.zeros(num_layers, 2, dtype=torch.float32, device=device)

    def add(self, route: RecordingRoute) -> None:
        """Take in what a micro-batch recorded, once it is done."""
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
        """The sums of all ranks, the same on each. Collective over the mesh."""
        counts_LE, sums_L2 = self._counts_LE, self._sums_L2
        # Not over the tensor axis, whose ranks route the same tokens. Layers that a stage doesn't hold add zeros.
        for axis in (mesh.data, mesh.context, mesh.pipeline):
            counts_LE, sums_L2 = axis.sum(counts_LE), axis.sum(sums_L2)
        return RouterTotals(self._model, self._routing, counts_LE, *sums_L2.unbind(1))


def largest_bias(decoders: Iterable[Decoder], mesh: UpdateMesh, device: torch.device) -> float:
    """The metric router/bias_abs_max over all layers, 0 without biases. Collective over the mesh.

    `decoders` are the parts that this rank holds.
    """
    largest = [bias_E.abs().max() for decoder in decoders for _, bias_E in _biases(decoder)]
    return float(mesh.pipeline.max(torch.stack([torch.zeros((), device=device), *largest]).max()))


def _biases(decoder: Decoder) -> Iterator[tuple[int, Tensor]]:
    """The correction biases held, each with its layer."""
    for module in decoder.modules():
        if isinstance(module, SparseFeedForward) and module.gate.e_score_correction_bias is not None:
            yield module.layer, module.gate.e_score_correction_bias
