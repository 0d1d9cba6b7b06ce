"""Bytes of a switch of the resharding flow over each kind of link, and to and from the host, without a job.

Boxes of weights are cut, and their holders and receivers found, by the code of the run's plan; of weights that all
layouts cut alike, one is counted for all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from spmdrl.dataflow.resharding.gather import Received
from spmdrl.dataflow.resharding.planning.buckets import Bucket
from spmdrl.dataflow.resharding.planning.cells import Cell
from spmdrl.dataflow.resharding.planning.plan import (
    ReshardPlan,
    SlicesByRank,
    cells_by_block,
    lendable,
    plan_resharding,
)
from spmdrl.dataflow.resharding.planning.slice_layouts import (
    ParameterTable,
    fitted_stride,
    generation_slices,
    parameter_table,
    update_slices,
    without_repeats,
)
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import buffer_dtypes, compute_dtype
from spmdrl.engines.models.lora import is_adapter
from spmdrl.engines.training.updater import means_bytes
from spmdrl.job.model.replica import generation_engine_name
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.resources.layout import GenerationLayout
from spmdrl.runtime.launch import LaunchEnvironment

_FLOAT32_BYTES = torch.float32.itemsize
_ADAPTER = ".lora_A.weight"
_MOST_PIECES = 1 << 14
"""An all-gather's buckets are planned up to about this number of pieces, which takes seconds."""


@dataclass(frozen=True)
class ReshardingBytes:
    """Bytes of one switch of all ranks together."""

    first: Received
    later: Received
    """of each later switch: with adapters in the generator, of these alone"""
    to_host: int
    """training state copied out in a step after the first, if it leaves the device"""
    from_host: int
    """state copied back in such a step, models of single stages included"""
    equation_3: float
    """unused bytes on devices after naive resharding: R of the paper's Eq. 3; with the swap there are none"""


@dataclass(frozen=True)
class _Switch:
    """Slices of both sides, each of a weight that stands for `counts` ones, and bytes of an element on the wire."""

    table: ParameterTable
    counts: Mapping[str, int]
    held: SlicesByRank
    wanted: SlicesByRank
    item_bytes: Mapping[str, int]
    ranks_per_node: int
    plans_buckets: bool
    """true if an all-gather's buckets are few, and planned like the run's"""
    native: GenerationLayout | None
    """layout of a native engine"""

    def bytes_of(self, box: WeightSlice) -> int:
        """Return the bytes of a box, and of those it stands for."""
        return box.num_elements * self.item_bytes[box.name] * self.counts[box.name]


def resharding_bytes(
    checked: CheckedRun, decoders: Mapping[Role, DecoderConfig], launch: LaunchEnvironment, device_kind: str
) -> ReshardingBytes:
    """Return the bytes of a switch of `train` with these models.

    Bytes to and from the host are 0 if the training state can't leave; FSDP2's padding of uneven shards isn't counted.
    An all-gather of very many buckets is taken to fill them evenly, which may be a quarter too little.
    """
    switch, config = _switch(checked, decoders[POLICY], launch, device_kind), checked.config
    first = later = _received(switch, config.reshard)
    if any(map(is_adapter, switch.table.rules)):
        adapters = {rank: [box for box in boxes if is_adapter(box.name)] for rank, boxes in switch.wanted.items()}
        later = _received(replace(switch, wanted=adapters), config.reshard)
    swapped, (updating, generating) = [(0, 0)], checked.sets_of(launch.world_size)
    if config.reshard.swap != "never" and updating == generating:
        computed = compute_dtype(config.model, device_kind).itemsize
        trainers = [(role, decoder) for role, decoder in decoders.items() if role.engine == "training"]
        swapped = [_swapped(checked, *trainer, switch.native, computed) for trainer in trainers]
    to_host, from_host = map(sum, zip(*swapped, strict=True))
    return ReshardingBytes(first, later, to_host, from_host, _equation_3(checked, switch, len(generating)))


def generation_layout(
    checked: CheckedRun, table: ParameterTable, launch: LaunchEnvironment, device_kind: str
) -> GenerationLayout:
    """Return the layout that the policy generates under, with its stride."""
    layout, (updating, generating) = checked.config.resources.generation, checked.sets_of(launch.world_size)
    if updating != generating or _is_vllm(checked, device_kind):
        return replace(layout, tensor_stride=layout.tensor_stride or 1)
    return fitted_stride(table, checked.layout, layout, launch.local_world_size)


def _is_vllm(checked: CheckedRun, device_kind: str) -> bool:
    return generation_engine_name(checked.config.rollout, device_kind) == "vllm"


def _switch(checked: CheckedRun, policy: DecoderConfig, launch: LaunchEnvironment, device_kind: str) -> _Switch:
    config, (updating, generating) = checked.config, checked.sets_of(launch.world_size)
    layout = generation_layout(checked, parameter_table(policy), launch, device_kind)
    is_vllm, item_bytes = _is_vllm(checked, device_kind), compute_dtype(config.model, device_kind).itemsize
    if is_vllm and policy.lora is None:
        # It takes whole weights, and casts them itself.
        item_bytes = _FLOAT32_BYTES
    if policy.lora is not None and (policy.lora.merge or is_vllm):
        policy = replace(policy, lora=None)
    table, buffers = parameter_table(policy), buffer_dtypes(policy)
    own_bytes = {} if is_vllm else {name: dtype.itemsize for name, dtype in buffers.items()}
    counts = dict.fromkeys(table.rules, 1)
    num_buckets = item_bytes * sum(map(math.prod, table.shapes.values())) // config.reshard.bucket_bytes
    is_small = num_buckets * launch.world_size <= _MOST_PIECES
    plans_buckets = config.reshard.executor == "allgather" and is_small
    if not plans_buckets:
        kinds = {name: (policy.updates(name), own_bytes.get(name)) for name in table.rules}
        table, counts = without_repeats(table, checked.layout, kinds)
    whole = [whole_slice(name, shape) for name, shape in table.shapes.items()]
    return _Switch(
        table,
        counts,
        {rank: update_slices(table, checked.layout, rank) for rank in updating},
        {rank: whole if is_vllm else generation_slices(table, layout, place) for place, rank in enumerate(generating)},
        {name: own_bytes.get(name, item_bytes) for name in table.rules},
        launch.local_world_size,
        plans_buckets,
        None if is_vllm else layout,
    )


def _received(switch: _Switch, config: ReshardConfig) -> Received:
    """Return what all ranks receive of one switch."""
    if switch.plans_buckets:
        plan = plan_resharding(
            switch.held, switch.wanted, switch.table.shapes, config.bucket_bytes, switch.item_bytes,
            ranks_per_node=switch.ranks_per_node,
        )  # fmt: skip
        segments = ((block.ranks, segment_bytes(plan, bucket)) for block in plan.blocks for bucket in block.buckets)
        return sum((_allgathered(*segment, switch.ranks_per_node) for segment in segments), Received())
    total, count = Received(), _sent if config.executor == "exact" else _gathered
    for ranks, cells_of_weights in cells_by_block(switch.held, switch.wanted, switch.table.shapes):
        total = sum((count(cells, ranks, switch) for cells in cells_of_weights), total)
    return total


def _sent(cells: Iterable[Cell], _: range, switch: _Switch) -> Received:
    """Return what ranks receive that lack a weight's cells: from their node if it has a holder, else from another."""
    same, cross, per_node = 0, 0, switch.ranks_per_node
    for cell in cells:
        holders, num_bytes = {*cell.holders}, switch.bytes_of(cell.box)
        nodes = {rank // per_node for rank in holders}
        is_near = [rank // per_node in nodes for rank in cell.wanters if rank not in holders]
        same += num_bytes * is_near.count(True)
        cross += num_bytes * is_near.count(False)
    return Received(same, cross)


def _gathered(cells: Iterable[Cell], ranks: range, switch: _Switch) -> Received:
    """Return what ranks receive if a weight's missing cells, shared out over their holders, are all-gathered alone."""
    sent = Counter[int]()
    for cell in cells:
        if {*cell.wanters} - {*cell.holders}:
            sent.update(dict.fromkeys(cell.holders, switch.bytes_of(cell.box) // len(cell.holders)))
    return _allgathered(ranks, max(sent.values(), default=0), switch.ranks_per_node)


def segment_bytes(plan: ReshardPlan, bucket: Bucket) -> int:
    """Return the bytes that each rank sends if a bucket is all-gathered: as many as the one with most."""
    segments = Counter[int]()
    for piece in bucket.pieces:
        if piece.is_missing:
            segments[piece.contributor] += plan.num_bytes(piece.box)
    return max(segments.values(), default=0)


def _allgathered(ranks: range, num_bytes: int, ranks_per_node: int) -> Received:
    """Return what a block's ranks receive if each of them sends so many bytes to all others."""
    num_near = sum(size * (size - 1) for size in Counter(rank // ranks_per_node for rank in ranks).values())
    return Received(num_near * num_bytes, (len(ranks) * (len(ranks) - 1) - num_near) * num_bytes)


def _swapped(
    checked: CheckedRun, role: Role, decoder: DecoderConfig, generation: GenerationLayout | None, computed: int
) -> tuple[int, int]:
    """Return a model's bytes to the host and from it, in a step that finds the frozen weights there already.

    A native engine has the layout `generation`; `computed` are the bytes of an element that layers compute in.
    """
    layout, whole, to_host, from_host = checked.layout_of(role), parameter_table(decoder), 0, 0
    adapted = {f"{name.removesuffix(_ADAPTER)}.weight" for name in whole.rules if name.endswith(_ADAPTER)}
    kinds = {name: (decoder.updates(name), name in adapted) for name in whole.rules}
    table, counts = without_repeats(whole, layout, kinds)
    num_uses = 1 if role.presence == "training" else sum(slot.role is role for slot in checked.slots)
    for rank in range(layout.num_ranks):
        boxes, lent = update_slices(table, layout, rank), frozenset[str]()
        if role is POLICY and generation is not None:
            lent = _lent(decoder, boxes, generation_slices(table, generation, rank), adapted, computed)
        for box in boxes:
            num_elements, is_out = counts[box.name] * box.num_elements, box.name not in lent
            if role.is_trained and decoder.updates(box.name):
                means = 0 if table.rules[box.name].is_buffer else means_bytes(checked.optim_of(role), box.name)
                to_host += num_elements * (_FLOAT32_BYTES * is_out + means)
                from_host += num_elements * (_FLOAT32_BYTES * is_out + means)
            else:
                from_host += num_elements * computed * is_out * num_uses
    return to_host, from_host


def _lent(
    decoder: DecoderConfig, held: Sequence[WeightSlice], wanted: Sequence[WeightSlice], adapted: Container[str],
    item_bytes: int,
) -> frozenset[str]:  # fmt: skip
    """Return weights that generation reads where they lie: its own slices in its dtype, unless adapters are merged."""
    merges = decoder.lora is not None and decoder.lora.merge
    return frozenset(
        name
        for name in lendable(held, wanted)
        if (item_bytes == _FLOAT32_BYTES or not decoder.updates(name)) and not (merges and name in adapted)
    )


def _equation_3(checked: CheckedRun, switch: _Switch, num_generating: int) -> float:
    layout, sizes = checked.config.resources.generation, Counter[str]()
    for name, rule in switch.table.rules.items():
        kind = "expert" if rule.is_expert else "other" if rule.tensor is None else "tensor"
        sizes[kind] += switch.bytes_of(whole_slice(name, rule.shape))
    return redundant_bytes(
        sizes["tensor"],
        sizes["expert"],
        update_tensor_size=checked.layout.tensor,
        generation_data_size=num_generating // layout.tensor,
        generation_expert_size=layout.expert,
    )


def redundant_bytes(
    tensor_weight_bytes: float,
    expert_weight_bytes: float,
    *,
    update_tensor_size: int,
    generation_data_size: int,
    generation_expert_size: int,
) -> float:
    """Return the bytes that naive resharding leaves unused: R = GDP x (TW / UTP + EW / GEP).

    That is on all devices where generation isn't tensor-parallel, and a replica's share where it is.

    Source: MindSpeed RL (arXiv:2507.19017), Eq. 3. TW and EW are the sizes of the tensor- and expert-parallel weights.
    """
    per_replica = tensor_weight_bytes / update_tensor_size + expert_weight_bytes / generation_expert_size
    return generation_data_size * per_replica
