"""Memory of ranks by worker state and owner: traced bytes, and those of the models that a state needs present."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from spmdrl.dataflow.resharding.planning.plan import lendable
from spmdrl.dataflow.resharding.planning.slice_layouts import (
    fitted_stride,
    generation_slices,
    parameter_table,
    update_slices,
)
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.engines.training.assignment import layer_spans, stage_ranks
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.replica import generation_engine_name
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.estimates import rank_bytes
from spmdrl.nouns.roles import Role, WorkerState
from spmdrl.plan.account import Account, Span
from spmdrl.plan.planned_device import NAME, alone_in, planned_device
from spmdrl.plan.planned_rows import RowLengths
from spmdrl.plan.traced_generation import NoRoom, PlannedGenerator, trace_generation
from spmdrl.plan.traced_rank import RankTrace, TracedRank
from spmdrl.resources.layout import UpdateLayout
from spmdrl.runtime.launch import LaunchEnvironment

SWITCH = "switch"


@dataclass(frozen=True)
class SlotPlan:
    """Memory of one part of a step on one rank."""

    name: str
    """worker state, or the switch to generation"""
    owners: Mapping[str, int]
    """bytes by owner, at the moment when together they are most"""
    span: Span | None = None
    num_passes: int = 0
    """micro-batches"""
    num_traced: int = 0
    """micro-batches that ran for it"""
    num_repeats: int = 1
    """times that the work of `span` is done in a step"""
    bubble: float = 0.0
    """idle time of a pipeline as a share of the busy time"""
    refusal: str = ""
    """reason why a run would stop here"""

    @property
    def peak_bytes(self) -> int:
        return sum(self.owners.values())


@dataclass(frozen=True)
class RankPlan:
    """Memory of one rank, and of the ranks that are like it."""

    rank: int
    alike: Sequence[int]
    """ranks with the same part of the models, this one among them"""
    slots: Sequence[SlotPlan]

    @property
    def fullest(self) -> SlotPlan:
        """Part of a step with most bytes."""
        return max(self.slots, key=lambda slot: slot.peak_bytes)


def rank_classes(checked: CheckedRun, sources: Mapping[Role, ModelSource], num_ranks: int) -> list[list[int]]:
    """Return ranks by the layers of each model that they hold and by whether they generate.

    The first of each has most elements: cuts that aren't even leave the last ranks less.
    """
    training, generating = checked.sets_of(num_ranks)
    cut = [(checked.layout_of(role), source.decoder) for role, source in sources.items() if role.engine == "training"]
    stages = [(layout.num_ranks // layout.pipeline, _stage_kinds(layout, decoder)) for layout, decoder in cut]
    classes: dict[tuple[object, ...], list[int]] = {}
    for rank in range(num_ranks):
        held = [kinds[rank // ranks_each] for ranks_each, kinds in stages] if rank in training else []
        classes.setdefault((rank in generating, *held), []).append(rank)
    return list(classes.values())


def _stage_kinds(layout: UpdateLayout, decoder: DecoderConfig) -> list[str]:
    """Return the kinds of layers that each stage of a pipeline holds, and the ends of the model."""
    kinds, mixers, moe = list[str](), decoder.mixers, decoder.moe
    spans = layer_spans(decoder.num_layers, layout.pipeline * layout.pipeline_chunks)
    for stage in range(layout.pipeline):
        held = [span for span, holder in zip(spans, stage_ranks(layout), strict=True) if holder == stage]
        layers = [layer for span in held for layer in range(span.first, span.stop)]
        found = Counter(str((mixers[layer], moe is None or layer in moe.dense_layers)) for layer in layers)
        kinds.append(str((sorted(found.items()), [(span.embeds, span.heads) for span in held])))
    return kinds


def swaps(
    checked: CheckedRun, sources: Mapping[Role, ModelSource], launch: LaunchEnvironment, total_bytes: int
) -> bool:  # fmt: skip
    """Return True if the training state leaves devices of this size for generation; as `swap_choice` decides."""
    mode, rollout = checked.config.reshard.swap, checked.config.rollout
    if mode != "auto" or checked.config.resources.ranks.generation:
        return mode == "always" and not checked.config.resources.ranks.generation
    trained = {role: source.decoder for role, source in sources.items() if role.engine == "training"}
    owners = rank_bytes(checked, trained, launch, NAME)
    generation = sum(owners.pop(owner, 0) for owner in ("generation_weights", "kv_cache"))
    gradients = owners.pop("gradients", 0)
    needed = sum(owners.values()) + max(gradients, generation + checked.config.reshard.bucket_bytes)
    return needed > rollout.gpu_memory_utilization * total_bytes


def trace_rank(
    checked: CheckedRun, sources: Mapping[Role, ModelSource], launch: LaunchEnvironment, lengths: RowLengths, *,
    more_passes: int | None,
) -> RankTrace:  # fmt: skip
    """Trace the states of one rank that score or train, with as many micro-batches as in `TracedRank`."""
    account = Account()
    with alone_in(launch) as world, planned_device(account):
        return TracedRank(checked, sources, world, account, more_passes=more_passes).trace(lengths)


@dataclass(frozen=True)
class GenerationTrace:
    """Trace of a rank that generates."""

    held: Mapping[str, int]
    """bytes by owner"""
    span: Span
    refusal: str = ""


def trace_generating(
    planned: PlannedGenerator, launch: LaunchEnvironment, *, total_bytes: int, kept_bytes: int
) -> GenerationTrace:  # fmt: skip
    """Trace the generation of one rank, beside `kept_bytes` on its device."""
    account = Account()
    with alone_in(launch) as world, planned_device(account):
        try:
            held, span = trace_generation(planned, world, account, total_bytes=total_bytes, kept_bytes=kept_bytes)
        except NoRoom as error:
            return GenerationTrace(account.held, Span(), str(error))
    return GenerationTrace(held, span)


@dataclass(frozen=True)
class Shared:
    """Bytes of a rank's generation weights that aren't there in generation alone."""

    lent: int = 0
    """training weights that the generator reads in place: the same slice in the same dtype"""
    kept: int = 0
    """weights that stay with the generator during updates, as only adapters change"""

    @classmethod
    def of(cls, checked: CheckedRun, source: ModelSource, launch: LaunchEnvironment) -> Shared:
        """Return those of a rank that trains and generates; vLLM shares none."""
        lora, layout = source.decoder.lora, checked.config.resources.generation
        if generation_engine_name(checked.config.rollout, NAME) == "vllm":
            return cls()
        training, generating = checked.sets_of(launch.world_size)
        dtype = compute_dtype(checked.config.model, NAME)
        # Trained weights are in float32.
        if training != generating or (dtype != torch.float32 if lora is None else lora.merge):
            return cls()
        table = parameter_table(source.decoder)
        layout = fitted_stride(table, checked.layout, layout, launch.local_world_size)
        wanted = generation_slices(table, layout, launch.rank)
        names = lendable(update_slices(table, checked.layout, launch.rank), wanted)
        if dtype != torch.float32:
            names = frozenset(name for name in names if not source.decoder.updates(name))
        frozen = [box for box in wanted if not source.decoder.updates(box.name) and box.name not in names]
        lent = [box for box in wanted if box.name in names]
        return cls(*(sum(box.num_elements for box in boxes) * dtype.itemsize for boxes in (lent, frozen)))


def slots_of(
    checked: CheckedRun, traced: RankTrace, generation: GenerationTrace | None, judge: GenerationTrace | None,
    shared: Shared, *, is_swapped: bool,
) -> Iterator[SlotPlan]:  # fmt: skip
    """Yield the parts of a rank's step in order, each with what is present in it."""
    held = Counter(traced.held)
    frozen = {role.weights for role in checked.roles if role.presence == "stage"}
    training = Counter({owner: size for owner, size in held.items() if owner not in frozen})
    engine, kept = Counter[str](), Counter({"generation_weights": shared.kept})
    if generation is not None:
        engine = Counter(generation.held)
        if not is_swapped:
            engine["generation_weights"] -= shared.lent
        if held:
            woken = Counter({"generation_weights": engine["generation_weights"]})
            bucket = Counter({"bucket": min(checked.config.reshard.bucket_bytes, woken.total())})
            yield SlotPlan(SWITCH, (max(training, woken, key=Counter.total) if is_swapped else held + woken) + bucket)
        present = engine + generation.span.owners + (Counter() if is_swapped else held)
        yield SlotPlan("generation", present, generation.span, refusal=generation.refusal)
    if judge is not None:
        present = judge.span.owners + Counter(judge.held) + (training if is_swapped else held) + kept
        yield SlotPlan(WorkerState.JUDGE.value, present, judge.span, refusal=judge.refusal)
    # As `build_portions` decides.
    waits = not is_swapped and checked.config.resources.generation.expert == 1
    beside = {slot.state for slot in checked.slots if waits and slot.beside is WorkerState.GENERATION}
    for state, slot in traced.slots.items():
        own = Counter({owner: held[owner] for owner in frozen & {slot.role.weights}})
        present = (training + own if is_swapped else held) + slot.span.owners + (engine if state in beside else kept)
        repeats = slot.num_passes // max(slot.num_together, 1)
        yield SlotPlan(
            state.value, present, slot.span, slot.num_passes, slot.num_traced, num_repeats=repeats, bubble=slot.bubble
        )
