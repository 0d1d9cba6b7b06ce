"""Boxes of weights that a rank holds under an update layout and wants under a generation layout. Integers only.

A `ParameterTable` has rules for cutting weights, a layout the numbers of ranks. Update layouts are cut like the
training engine's: layers over the pipeline, experts, the tensor axis, and the rest in FSDP2's chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from spmdrl.engines.models.decoder import Decoder, DecoderConfig, LayerSpan
from spmdrl.engines.parallel.weight_cuts import TensorCut, chunk_of, expert_shard_dim, is_of_experts, tensor_cut
from spmdrl.engines.training.assignment import layer_spans, stage_ranks
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.resources.layout import GenerationLayout, UpdateLayout


@dataclass(frozen=True)
class WeightRule:
    """Places that need a weight, and rules for cutting it."""

    shape: tuple[int, ...]
    layer: int | None = None
    """Layer that it belongs to, if any."""
    embeds: bool = False
    """True if the stage with the first layer needs it."""
    heads: bool = False
    """True if the stage with the last layer needs it."""
    tensor: TensorCut | None = None
    is_expert: bool = False
    """True if dim 0 counts experts."""
    is_buffer: bool = False
    """True if it is no parameter, so that FSDP2 leaves it whole."""

    def is_in(self, span: LayerSpan) -> bool:
        in_layers = self.layer is not None and span.first <= self.layer < span.stop
        return in_layers or (self.embeds and span.embeds) or (self.heads and span.heads)


@dataclass(frozen=True)
class ParameterTable:
    """All weights of a model, in its order."""

    rules: dict[str, WeightRule]
    num_layers: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: rule.shape for name, rule in self.rules.items()}


def parameter_table(config: DecoderConfig) -> ParameterTable:
    """Return the table of a decoder's weights."""
    with torch.device("meta"):
        decoder = Decoder(config)
    buffers = {name for name, _ in decoder.named_buffers()}
    rules = {
        name: _rule(config, name, tuple(weight.shape), is_buffer=name in buffers)
        for name, weight in decoder.state_dict().items()
    }
    return ParameterTable(rules, config.num_layers)


def update_slices(table: ParameterTable, layout: UpdateLayout, rank: int) -> list[WeightSlice]:
    """Return a rank's boxes under a fitted update layout, in the table's order; boxes may be empty."""
    outer, tensor = divmod(rank, layout.tensor)
    pipeline, place = divmod(outer, layout.data * layout.shard * layout.context)
    spans = layer_spans(table.num_layers, layout.pipeline * layout.pipeline_chunks)
    held = [span for span, holder in zip(spans, stage_ranks(layout), strict=True) if holder == pipeline]
    slices = []
    for name, rule in table.rules.items():
        if any(rule.is_in(span) for span in held):
            box = whole_slice(name, rule.shape)
            spread = rule.is_expert and layout.expert > 1
            if spread:
                box = _chunk(box, 0, layout.expert, place % layout.expert)
            box = _tensor_part(box, rule, layout.tensor, tensor)
            if spread:
                dim = expert_shard_dim(box.shape, layout.expert_shard)
                box = _chunk(box, dim, layout.expert_shard, place // layout.expert % layout.expert_shard)
            elif not rule.is_buffer:
                num_shards = layout.shard * layout.context
                box = _chunk(box, 0, num_shards, place % num_shards)
            slices.append(box)
    return slices


def generation_slices(table: ParameterTable, layout: GenerationLayout, rank: int) -> list[WeightSlice]:
    """Return a rank's boxes for generation, in the table's order; uneven degrees give the last ranks less."""
    slices = []
    _, place = layout.place(rank)
    for name, rule in table.rules.items():
        whole = whole_slice(name, rule.shape)
        if rule.is_expert and layout.expert > 1:
            slices.append(_chunk(whole, 0, layout.expert, layout.expert_place(rank)))
        else:
            slices.append(_tensor_part(whole, rule, layout.tensor, place))
    return slices


def _chunk(box: WeightSlice, dim: int, num_ranks: int, rank: int) -> WeightSlice:
    return box.narrowed(dim, *chunk_of(box.shape[dim], num_ranks, rank))


def _tensor_part(box: WeightSlice, rule: WeightRule, num_ranks: int, rank: int) -> WeightSlice:
    """Return a tensor rank's part of a box that is whole along the cut dim."""
    if rule.tensor is None:
        return box
    return box.narrowed(rule.tensor.dim, *rule.tensor.interval(box.shape[rule.tensor.dim], num_ranks, rank))


def fitted_stride(
    table: ParameterTable, update: UpdateLayout, generation: GenerationLayout, ranks_per_node: int
) -> GenerationLayout:
    """Return the generation layout with a stride between an engine's ranks if it was left open.

    Of the strides that keep an engine on as few nodes as neighbouring ranks would, it is the one at which ranks already
    hold most of what they want. `update` is a fitted layout.
    """
    if generation.tensor_stride:
        return generation
    num_ranks, tensor = update.num_ranks, generation.tensor
    strides = [n for n in range(2, ranks_per_node // tensor + 1) if ranks_per_node % (n * tensor) == 0]
    if tensor == 1 or not strides:
        return replace(generation, tensor_stride=1)
    thin, counts = without_repeats(table, update)
    held = [{box.name: box for box in update_slices(thin, update, rank)} for rank in range(num_ranks)]

    def kept(stride: int) -> int:
        layout = replace(generation, tensor_stride=stride)
        return sum(_num_shared(held[rank], generation_slices(thin, layout, rank), counts) for rank in range(num_ranks))

    return replace(generation, tensor_stride=max([1, *strides], key=kept))


def without_repeats(
    table: ParameterTable, update: UpdateLayout, kinds: Mapping[str, object] = MappingProxyType({})
) -> tuple[ParameterTable, dict[str, int]]:
    """Return the table with one of the weights that all layouts cut alike, and the number of weights it stands for.

    These have the same rule but for the layer, the same ranks of the fitted layout `update`, and the same kind by name.
    """
    spans = layer_spans(table.num_layers, update.pipeline * update.pipeline_chunks)
    first: dict[object, str] = {}
    counts: dict[str, int] = {}
    for name, rule in table.rules.items():
        holders = tuple(rule.is_in(span) for span in spans)
        alike = first.setdefault((replace(rule, layer=None), holders, kinds.get(name)), name)
        counts[alike] = counts.get(alike, 0) + 1
    return ParameterTable({name: table.rules[name] for name in counts}, table.num_layers), counts


def _num_shared(held: Mapping[str, WeightSlice], wanted: Iterable[WeightSlice], counts: Mapping[str, int]) -> int:
    """Count elements that are both held and wanted, each as often as `counts` says of its weight."""
    shared = (held[box.name].intersect(box) for box in wanted if box.name in held)
    return sum(counts[box.name] * box.num_elements for box in shared if box is not None)


def _rule(config: DecoderConfig, name: str, shape: tuple[int, ...], *, is_buffer: bool) -> WeightRule:
    """Return the rule that follows from a weight's name."""
    parts = name.split(".")
    is_layer, is_embedding = "layers" in parts, parts[-2] == "embed_tokens"
    return WeightRule(
        shape,
        layer=int(parts[parts.index("layers") + 1]) if is_layer else None,
        embeds=is_embedding,
        # A tied head keeps its own embedding.
        heads=config.tied_head if is_embedding else not is_layer,
        tensor=tensor_cut(config, name, shape),
        is_expert=is_of_experts(name),
        is_buffer=is_buffer,
    )
