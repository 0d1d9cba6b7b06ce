"""What naive resharding leaves unused on devices, by Eq. 3 of the MindSpeed RL paper and by the plan for real shapes.

Nothing is run: slices of every weight under both layouts, the plan between them, and the bytes that follow.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from spmdrl.dataflow.resharding.planning.plan import plan_resharding
from spmdrl.dataflow.resharding.planning.slice_layouts import (
    WeightRule,
    fitted_stride,
    generation_slices,
    parameter_table,
    update_slices,
)
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.nouns.batch import WeightSlice
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.plan.resharding_bytes import redundant_bytes
from spmdrl.resources.layout import GenerationLayout, UpdateLayout
from tests.bench.harness.bench_models import QWEN3_30B_A3B, QWEN25_32B
from tests.bench.harness.bench_table import BenchTable
from tests.bench.resharding.plan_bytes import allgather_bytes, least_bytes

BFLOAT16_BYTES = 2
DEVICES_PER_NODE = 8
GB, GIB = 1e9, 2**30


@dataclass(frozen=True)
class SwitchCase:
    """One switch of one model."""

    model: str
    switch: str
    """In the paper's words for layouts."""
    config: DecoderConfig
    update: UpdateLayout
    generation: GenerationLayout
    paper: str | None
    """What the paper prints of it."""
    remark: str
    """How that and our figures go together."""

    @property
    def generation_data(self) -> int:
        """Replicas that generate."""
        return self.update.num_ranks // self.generation.tensor


CASES = (
    SwitchCase(
        "Qwen2.5-32B",
        "TP8DP2 -> TP4DP4",
        QWEN25_32B,
        UpdateLayout(data=2, shard=1, tensor=8),
        GenerationLayout(tensor=4),
        paper="8 GB a device",
        remark="The paper's figure is the bracket, TW / UTP. GDP times it is less than all devices have, because GDP "
        "counts them only where each generates alone, as in Figure 3; here they are GDP x GTP = 16.",
    ),
    SwitchCase(
        "Qwen3-30B-A3B",
        "TP2EP2DP2 -> TP1EP4DP4",
        QWEN3_30B_A3B,
        UpdateLayout(data=2, shard=1, tensor=2, expert=2),
        GenerationLayout(expert=4),
        paper="over 60 GB",
        remark="The paper names no layout beside its figure; this one is Figure 3's, which it refers to there. The "
        "figure follows if it is of all devices together, in GB of 10^9 bytes.",
    ),
    SwitchCase(
        "Qwen3-30B-A3B",
        "TP2EP8DP8 -> TP1EP16DP16",
        QWEN3_30B_A3B,
        UpdateLayout(data=8, shard=1, tensor=2, expert=8),
        GenerationLayout(expert=16),
        paper=None,
        remark="The same on as many devices as the paper's comparison of frameworks takes; this layout is ours. The "
        "experts' part stays, the other grows with the replicas.",
    ),
)


@dataclass(frozen=True)
class SwitchBytes:
    """Bytes of one case; those by device are of the device with the most."""

    devices: int
    tensor_weights: int
    """TW: what the tensor axis cuts, experts aside."""
    expert_weights: int
    """EW."""
    other_weights: int
    """What every device has whole."""
    equation_3: float
    """R."""
    unused: int
    """Left unused by naive resharding, on all devices."""
    unused_by_device: int
    exact_by_device: int
    """Received where each device receives what it lacks: the least possible for ranks in this order."""
    fitted_by_device: int
    """The same with the ranks of each engine as far apart as leaves most slices where they are."""
    tensor_stride: int
    """That distance."""
    allgather_by_device: int
    """Received where each bucket is all-gathered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The table has no settings."""


def run(arguments: argparse.Namespace) -> BenchTable:
    """Plan every case."""
    figures = [(case, figures_of(case)) for case in CASES]
    rows = [_row(case, found) for case, found in figures]
    return BenchTable(
        title="bench redundancy: GB in bfloat16 that naive resharding leaves unused, and that a switch moves",
        rows=rows,
        notes=(
            *dict.fromkeys(_shapes(case, found) for case, found in figures),
            "Unused is what update weights keep occupied on a device if nothing is swapped: all of a weight that is "
            "gathered into a new buffer, and what isn't selected of one that is used where it lies.",
            "Exact and all-gather are received on the device that receives most; exact is the least possible for ranks "
            "in this order. Fitted is exact with the ranks of an engine so far apart that most slices stay where they "
            "are, within a node of 8 devices; a job takes that distance unless another is configured.",
            *(_working(case, found) for case, found in figures),
        ),
        details={"cases": [{"model": case.model, "switch": case.switch, **asdict(found)} for case, found in figures]},
    )


def _row(case: SwitchCase, found: SwitchBytes) -> dict[str, object]:
    return {
        "model": case.model,
        "switch": case.switch,
        "R (Eq. 3)": found.equation_3 / GB,
        "unused in all": found.unused / GB,
        "unused a device": found.unused_by_device / GB,
        "paper": case.paper,
        "exact a device": found.exact_by_device / GB,
        "fitted a device": found.fitted_by_device / GB,
        "stride": found.tensor_stride,
        "all-gather a device": found.allgather_by_device / GB,
    }


def _shapes(case: SwitchCase, found: SwitchBytes) -> str:
    config = case.config
    width = str(config.intermediate_size)
    if config.moe is not None:
        width = f"{config.moe.num_experts} experts of {config.moe.intermediate_size}"
    num_weights = (found.tensor_weights + found.expert_weights + found.other_weights) / BFLOAT16_BYTES
    return (
        f"{case.model}: {config.num_layers} layers of width {config.hidden_size}, feed-forward {width}, "
        f"{config.num_heads} query and {config.num_kv_heads} key heads of {config.head_size}, vocabulary "
        f"{config.vocab_size}: {num_weights / 1e9:.2f} x 10^9 weights."
    )


def _working(case: SwitchCase, found: SwitchBytes) -> str:
    generation = case.generation
    tensor_part = f"{found.tensor_weights / GB:.2f} / {case.update.tensor}"
    expert_part = f"{found.expert_weights / GB:.2f} / {generation.expert}"
    by_device = f"{found.unused_by_device / GB:.2f} GB ({found.unused_by_device / GIB:.2f} GiB)"
    return (
        f"{case.model} {case.switch}: R = GDP x (TW / UTP + EW / GEP) = {case.generation_data} x ({tensor_part} + "
        f"{expert_part}) = {found.equation_3 / GB:.1f} GB ({found.equation_3 / GIB:.1f} GiB). By the plan, "
        f"{found.devices} devices leave {by_device} unused each, {found.unused / GB:.1f} GB in all. {case.remark}"
    )


def figures_of(case: SwitchCase) -> SwitchBytes:
    """Derive the slices and the plan of a case, and count."""
    table = parameter_table(case.config)
    ranks = range(case.update.num_ranks)
    held = {rank: update_slices(table, case.update, rank) for rank in ranks}
    wanted = {rank: generation_slices(table, case.generation, rank) for rank in ranks}
    plan = plan_resharding(held, wanted, table.shapes, ReshardConfig().bucket_bytes, BFLOAT16_BYTES)
    fitted = fitted_stride(table, case.update, case.generation, DEVICES_PER_NODE)
    fitted_wanted = {rank: generation_slices(table, fitted, rank) for rank in ranks}
    fitted_plan = plan_resharding(held, fitted_wanted, table.shapes, ReshardConfig().bucket_bytes, BFLOAT16_BYTES)
    unused = [unused_bytes(held[rank], wanted[rank], _bytes_of) for rank in ranks]
    rules = table.rules.values()
    tensor_weights = _num_bytes(rule for rule in rules if rule.tensor is not None and not rule.is_expert)
    expert_weights = _num_bytes(rule for rule in rules if rule.is_expert)
    return SwitchBytes(
        devices=len(ranks),
        tensor_weights=tensor_weights,
        expert_weights=expert_weights,
        other_weights=_num_bytes(rules) - tensor_weights - expert_weights,
        equation_3=redundant_bytes(
            tensor_weights,
            expert_weights,
            update_tensor_size=case.update.tensor,
            generation_data_size=case.generation_data,
            generation_expert_size=case.generation.expert,
        ),
        unused=sum(unused),
        unused_by_device=max(unused),
        exact_by_device=max(least_bytes(plan).values()),
        fitted_by_device=max(least_bytes(fitted_plan).values()),
        tensor_stride=fitted.tensor_stride,
        allgather_by_device=max(allgather_bytes(plan).values()),
    )


def unused_bytes(
    held: Sequence[WeightSlice], wanted: Sequence[WeightSlice], bytes_of: Callable[[WeightSlice], int]
) -> int:
    """Return the bytes that naive resharding leaves unused of a rank's update weights (the paper's Figure 3).

    A wanted slice inside a held one is used where it lies, and the rest of that storage stays occupied; any other is
    gathered into a new buffer, and all of the held one stays.
    """
    wanted_of = {box.name: box for box in wanted}
    used = [wanted_of[box.name] for box in held if box.intersect(wanted_of[box.name]) == wanted_of[box.name]]
    return sum(map(bytes_of, held)) - sum(map(bytes_of, used))


def _bytes_of(box: WeightSlice) -> int:
    return box.num_elements * BFLOAT16_BYTES


def _num_bytes(rules: Iterable[WeightRule]) -> int:
    return BFLOAT16_BYTES * sum(math.prod(rule.shape) for rule in rules)
