"""Which box of each weight a rank holds under an update layout and wants under a generation layout. Integers only.

A `ParameterTable` says how each weight may be cut; a layout says among how many ranks. Update layouts are cut as the
training engine does it: layers over the pipeline, experts, the tensor axis, and what is left in FSDP2's chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from spmdrl.engines.models.decoder import Decoder, DecoderConfig, LayerSpan
from spmdrl.engines.training.pipeline.assignment import layer_spans, stage_ranks
from spmdrl.engines.training.sharding.sharded_model import rows_held
from spmdrl.resources.layout import GenerationLayout, UpdateLayout
from spmdrl.types import WeightSlice


@dataclass(frozen=True)
class TensorCut:
    """How the tensor axis cuts a weight: by heads, columns or tokens of the vocabulary, rounded up a rank."""

    dim: int
    num_units: int
    """What is dealt out: heads are query heads, also for keys and values."""
    units_per_slot: int = 1
    """Units that share a slot of the dim, as query heads do a key head; ranks that split them hold the slot both."""

    def interval(self, length: int, num_ranks: int, rank: int) -> tuple[int, int]:
        """The part of a dim of this length that a rank holds."""
        first, stop = rows_held(self.num_units, num_ranks, rank)
        slot = length * self.units_per_slot // self.num_units
        return first // self.units_per_slot * slot, -(-stop // self.units_per_slot) * slot


@dataclass(frozen=True)
class WeightRule:
    """Where a weight is needed, and how it may be cut."""

    shape: tuple[int, ...]
    layer: int | None = None
    """The layer that it belongs to, where it belongs to one."""
    embeds: bool = False
    """Whether the stage with the first layer needs it."""
    heads: bool = False
    """Whether the stage with the last layer needs it."""
    tensor: TensorCut | None = None
    is_expert: bool = False
    """Whether dim 0 counts experts."""
    is_buffer: bool = False
    """Whether it is no parameter, so that FSDP2 leaves it whole."""

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
    """The table of a decoder's weights."""
    with torch.device("meta"):
        decoder = Decoder(config)
    buffers = {name for name, _ in decoder.named_buffers()}
    rules = {
        name: _rule(config, name, tuple(weight.shape), is_buffer=name in buffers)
        for name, weight in decoder.state_dict().items()
    }
    return ParameterTable(rules, config.num_layers)


def update_slices(table: ParameterTable, layout: UpdateLayout, rank: int) -> list[WeightSlice]:
    """What a rank holds under a fitted update layout, in the table's order; boxes may be empty."""
    outer, tensor = divmod(rank, layout.tensor)
    pipeline, place = divmod(outer, layout.data * layout.shard * layout.context)
    spans = layer_spans(table.num_layers, layout.pipeline * layout.pipeline_chunks)
    held = [span for span, holder in zip(spans, stage_ranks(layout), strict=True) if holder == pipeline]
    slices = []
    for name, rule in table.rules.items():
        if any(rule.is_in(span) for span in held):
            box = _Box(rule.shape)
            spread = rule.is_expert and layout.expert > 1
            if spread:
                box.cut(0, rows_held(rule.shape[0], layout.expert, place % layout.expert))
            if rule.tensor is not None:
                box.cut(rule.tensor.dim, rule.tensor.interval(rule.shape[rule.tensor.dim], layout.tensor, tensor))
            if spread:
                box.cut_for_experts(layout.expert_shard, place // layout.expert % layout.expert_shard)
            elif not rule.is_buffer:
                num_shards = layout.shard * layout.context
                box.cut(0, rows_held(box.lengths[0], num_shards, place % num_shards))
            slices.append(box.named(name))
    return slices


def generation_slices(table: ParameterTable, layout: GenerationLayout, rank: int) -> list[WeightSlice]:
    """What a rank wants to generate with, in the table's order; degrees that don't divide leave last ranks less."""
    slices = []
    _, place = layout.place(rank)
    for name, rule in table.rules.items():
        box = _Box(rule.shape)
        if rule.is_expert and layout.expert > 1:
            box.cut(0, rows_held(rule.shape[0], layout.expert, layout.expert_place(rank)))
        elif rule.tensor is not None:
            box.cut(rule.tensor.dim, rule.tensor.interval(rule.shape[rule.tensor.dim], layout.tensor, place))
        slices.append(box.named(name))
    return slices


def fitted_stride(
    table: ParameterTable, update: UpdateLayout, generation: GenerationLayout, ranks_per_node: int
) -> GenerationLayout:
    """The generation layout with a distance between the ranks of an engine, where that was left open.

    It is the one at which all ranks together hold most of what they will want, of those that keep an engine on as few
    nodes as neighbouring ranks would. `update` is a fitted layout.
    """
    if generation.tensor_stride:
        return generation
    num_ranks, tensor = update.num_ranks, generation.tensor
    strides = [n for n in range(2, ranks_per_node // tensor + 1) if ranks_per_node % (n * tensor) == 0]
    if tensor == 1 or not strides:
        return replace(generation, tensor_stride=1)
    held = [{box.name: box for box in update_slices(table, update, rank)} for rank in range(num_ranks)]

    def kept(stride: int) -> int:
        layout = replace(generation, tensor_stride=stride)
        return sum(_num_shared(held[rank], generation_slices(table, layout, rank)) for rank in range(num_ranks))

    return replace(generation, tensor_stride=max([1, *strides], key=kept))


def _num_shared(held: Mapping[str, WeightSlice], wanted: Iterable[WeightSlice]) -> int:
    """Elements that are both held and wanted."""
    shared = (held[box.name].intersect(box) for box in wanted if box.name in held)
    return sum(box.num_elements for box in shared if box is not None)


class _Box:
    """A box that shrinks as it is cut."""

    def __init__(self, shape: tuple[int, ...]):
        self.starts = [0] * len(shape)
        self.lengths = list(shape)

    def cut(self, dim: int, interval: tuple[int, int]) -> None:
        """Keeps this interval of a dim, counted within the box."""
        self.starts[dim] += interval[0]
        self.lengths[dim] = interval[1] - interval[0]

    def cut_for_experts(self, num_ranks: int, rank: int) -> None:
        """Cuts by experts where each rank gets as many, else by the next dim where that divides."""
        dims = [dim for dim in (0, 1) if self.lengths[dim] % num_ranks == 0]
        dim = dims[0] if dims else 0
        self.cut(dim, rows_held(self.lengths[dim], num_ranks, rank))

    def named(self, name: str) -> WeightSlice:
        stops = (start + length for start, length in zip(self.starts, self.lengths, strict=True))
        return WeightSlice(name, tuple(self.starts), tuple(stops))


def _rule(config: DecoderConfig, name: str, shape: tuple[int, ...], *, is_buffer: bool) -> WeightRule:
    """The rule that follows from a weight's name."""
    parts = name.split(".")
    module, kind = parts[-2:]
    is_layer, is_embedding = "layers" in parts, module == "embed_tokens"
    return WeightRule(
        shape,
        layer=int(parts[parts.index("layers") + 1]) if is_layer else None,
        embeds=is_embedding,
        # A tied head keeps an embedding of its own.
        heads=config.tied_head if is_embedding else not is_layer,
        tensor=_tensor_cut(config, module, kind, shape),
        is_expert=module == "experts",
        is_buffer=is_buffer,
    )


def _tensor_cut(config: DecoderConfig, module: str, kind: str, shape: tuple[int, ...]) -> TensorCut | None:
    """How the tensor axis cuts a weight or bias; norms, routers, value heads, MLA's down projections stay whole."""
    if module in ("embed_tokens", "lm_head"):
        return TensorCut(0, config.vocab_size)
    # An experts' stack has experts in front, and is named like a module's parameter.
    projection, first = (kind, 1) if module == "experts" else (module, 0)
    if projection in ("q_proj", "q_b_proj", "kv_b_proj"):
        return TensorCut(first, config.num_heads)
    if projection in ("k_proj", "v_proj"):
        return TensorCut(first, config.num_heads, config.num_heads // config.num_kv_heads)
    if projection in ("gate_proj", "up_proj"):
        return TensorCut(first, shape[first])
    if projection == "o_proj" and kind != "bias":
        return TensorCut(first + 1, config.num_heads)
    if projection == "down_proj" and kind != "bias":
        return TensorCut(first + 1, shape[first + 1])
    return None
