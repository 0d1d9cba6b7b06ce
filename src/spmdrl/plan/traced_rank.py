"""The models and worker states of one rank, built as a run builds them, on a planned device.

Every state that scores or trains runs on planned rows; what it allocates, computes and sends is its trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from spmdrl.dataflow.resharding.flow import groups_of
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.critic_states import CriticUpdateStage
from spmdrl.dataflow.stages.inference import score_stages
from spmdrl.dataflow.stages.rows import token_rows
from spmdrl.dataflow.stages.stages import Stage
from spmdrl.dataflow.stages.update import UpdatePlan, UpdateStage
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.engines.training.assignment import microbatch_count
from spmdrl.engines.training.packed_rows import MicroBatch
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.role_models import build_trainer
from spmdrl.job.start.checked_run import CheckedRun, agreement_of
from spmdrl.nouns.roles import CRITIC, POLICY, Role, WorkerState
from spmdrl.observability.metrics import Recorder
from spmdrl.plan.account import ACTIVATIONS, GRADIENTS, RECEIVED, ROWS, TRANSIENT, Account, Message, Span
from spmdrl.plan.planned_rows import PlannedSamples, RowLengths
from spmdrl.resources.mesh import join_update_mesh
from spmdrl.resources.world import World

_BETWEEN_STAGES = ("send", "recv_")


@dataclass(frozen=True)
class SlotTrace:
    """Trace of a worker state with a model."""

    role: Role
    span: Span
    num_passes: int
    """micro-batches of the whole slot"""
    bubble: float
    """idle time of a pipeline as a share of the busy time"""
    num_together: int
    """micro-batches of one optimizer step, or of one scoring of all rows"""
    num_traced: int
    """micro-batches that ran"""
    num_sent: tuple[int, int]
    """micro-batches that a pipeline sends, idle ones too: of those that ran, and of `num_together`"""


@dataclass(frozen=True)
class RankTrace:
    """Trace of one rank."""

    rank: int
    held: Mapping[str, int]
    """bytes by owner, of all models that are trained or score"""
    slots: Mapping[WorkerState, SlotTrace]


def extended(few: RankTrace, more: RankTrace) -> RankTrace:
    """Return the trace of all micro-batches from those of fewer and of more: each further one adds as much.

    A pipeline has buffers for each, and an update all their rows.
    """
    slots = {}
    for state, slot in more.slots.items():
        before, span, left = few.slots[state], slot.span, slot.num_together - slot.num_traced
        between, sent_left = max(slot.num_traced - before.num_traced, 1), slot.num_sent[1] - slot.num_sent[0]
        per_send = sent_left / max(slot.num_sent[0] - before.num_sent[0], 1)
        rows = span.owners[ROWS] - before.span.owners[ROWS]
        added = Counter({ROWS: rows * left // between, RECEIVED: span.owners[RECEIVED] * sent_left // slot.num_sent[0]})
        if before.num_traced > 1:
            # Both have all that lives together: the rest is what each leaves behind. Owners may be at their most at
            # different moments, so that they count together.
            rest = span.owners.total() - before.span.owners.total() - rows
            added[ACTIVATIONS] = max(rest, 0) * left // between
        work = span.work + left / between * (span.work - before.span.work)
        messages: Counter[Message] = Counter()
        for message, count in span.messages.items():
            if fewer := before.span.messages[message]:
                per_pass = per_send if message.operation in _BETWEEN_STAGES else left / between
                count += round(per_pass * (count - fewer))
            else:
                # One for all micro-batches, and as large as they are many.
                message = replace(message, num_bytes=message.num_bytes * slot.num_together // slot.num_traced)
            messages[message] += count
        slots[state] = replace(slot, span=Span(span.owners + added, work, messages))
    return replace(more, slots=slots)


class TracedRank:
    """One rank's engines on a planned device; made inside `planned_device`."""

    def __init__(
        self, checked: CheckedRun, sources: Mapping[Role, ModelSource], world: World, account: Account, *,
        more_passes: int | None = 0,
    ):  # fmt: skip
        """Build the engines. Of the micro-batches as many are traced as `extended` needs, with 0 and 1 `more_passes`;
        None: all."""
        self._more_passes = more_passes
        self._checked, self._world, self._account = checked, world, account
        self.engines: dict[Role, TrainingEngine] = {}
        self.held: Counter[str] = Counter()
        for role, source in sources.items():
            mesh = join_update_mesh(checked.layout_of(role), world.device, world.rank)
            if role.engine != "training" or mesh is None:
                continue
            with account.own("buffers"):
                engine = self.engines[role] = build_trainer(checked, role, source, mesh, world)
            for owner, tensors in groups_of(role, engine).items():
                account.attribute(tensors().values(), owner)
            _attribute_gradients(engine, account)
            _attribute_rows(engine, account)
        self.held = account.held

    def trace(self, lengths: RowLengths) -> RankTrace:
        """Run the states in the order of the schedule."""
        stages, slots = self._stages() if self.engines else {}, {}
        for slot in self._checked.slots:
            if slot.role in self.engines and slot.state in stages:
                slots[slot.state] = self._trace_slot(slot.state, slot.role, stages[slot.state], lengths)
        return RankTrace(self._world.rank, dict(self.held), slots)

    def _trace_slot(self, state: WorkerState, role: Role, stage: Stage, lengths: RowLengths) -> SlotTrace:
        engine, config = self.engines[role], self._checked.config
        moe, layers = engine.config.moe, engine.config.num_layers
        num_experts = 0 if moe is None else moe.experts_per_token * (layers - len(moe.dense_layers))
        num_rows = config.rollout.prompts_per_step * config.rollout.num_generations
        samples = PlannedSamples(
            self._checked, self.engines[POLICY].config.vocab_size, lengths, -(-num_rows // engine.mesh.data.size),
            num_experts=num_experts,
        )  # fmt: skip
        parts = config.train.updates_per_step if state.work == "train" else 1
        samples.keep(range(-(-samples.num_all // parts)))
        batch = samples.take(state, {"prompt_ids", "response_ids"})
        passes = engine.fitted.plan(token_rows(batch, engine.config))
        num_traced = min(len(passes), self._most_passes(engine, trains=state.work == "train"))
        samples.keep([row for members in passes[:num_traced] for row in members])
        epochs = config.train.epochs_per_step if state.work == "train" else 1
        with self._account.own_received(), self._account.span(lambda owner: owner not in TRANSIENT) as span:
            stage(cast(Samples, samples))
        layout = engine.mesh.layout
        bubble = (layout.pipeline - 1) / (layout.pipeline_chunks * len(passes))
        sent = num_traced, len(passes)
        if layout.pipeline > 1 and state.work == "train":
            sent = microbatch_count(num_traced, layout), microbatch_count(len(passes), layout)
        return SlotTrace(role, span, len(passes) * parts * epochs, bubble, len(passes), num_traced, sent)

    def _most_passes(self, engine: TrainingEngine, *, trains: bool) -> int:
        """Return how many micro-batches to trace."""
        layout, more = engine.mesh.layout, self._more_passes
        if more is None or (trains and layout.pipeline > 1 and layout.pipeline_schedule == "gpipe"):
            # This schedule holds all micro-batches of an update.
            return 1 << 30
        if trains and layout.pipeline > 1:
            # Rounds of all ranks where there are several chunks, as an idle micro-batch takes a whole one's place.
            further = layout.pipeline if layout.pipeline_chunks > 1 else 1
            return layout.pipeline * layout.pipeline_chunks + further if more else 1
        # One runs before there are gradients, or results of another, and one beside them; some are sent meanwhile.
        return 2 + (layout.pipeline > 1) + more

    def _stages(self) -> dict[WorkerState, Stage]:
        checked, config = self._checked, self._checked.config
        scores = score_stages(
            checked.slots, self.engines, _present, None, num_likeliest=checked.algorithm.num_likeliest
        )
        stages: dict[WorkerState, Stage] = {**scores}
        plan = UpdatePlan(
            1, 1, config.rollout.max_completion_length, skip_zero_advantage=False, agreement=agreement_of(config)
        )
        update = UpdateStage(self.engines[POLICY], plan, Recorder(), ShownRows(0))
        stages[WorkerState.UPDATE] = partial(_learn, update, checked)
        if config.critic is not None:
            stages[WorkerState.CRITIC_UPDATE] = CriticUpdateStage(self.engines[CRITIC], config.critic, plan, Recorder())
        return stages


def _learn(update: UpdateStage, checked: CheckedRun, samples: Samples) -> None:
    update(samples, checked.algorithm)


def _present(role: Role) -> AbstractContextManager[None]:
    return nullcontext()


def _attribute_gradients(engine: TrainingEngine, account: Account) -> None:
    """Attribute an engine's gradients before its optimizer drops them."""
    step = engine.step

    def step_after(accumulated: Any) -> Any:
        account.attribute([shard.tensor for shard in engine.model.named_gradients().values()], GRADIENTS)
        return step(accumulated)

    engine.step = step_after  # type: ignore[method-assign]


def _attribute_rows(engine: TrainingEngine, account: Account) -> None:
    """Attribute the rows of micro-batches, which are on the device before the first one runs."""
    passes = engine.fitted.passes
    prepare = passes.prepare

    def prepare_seen(*arguments: Any) -> Iterator[MicroBatch]:
        micros = prepare(*arguments)
        while True:
            with account.own(ROWS):
                micro = next(micros, None)
            if micro is None:
                return
            yield micro

    passes.prepare = prepare_seen  # type: ignore[method-assign,assignment]
