"""The models and worker states of one rank, built as a run builds them, on a planned device.

Every state that scores or trains runs on planned rows; what it allocates, computes and sends is its trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from spmdrl.dataflow.resharding.flow import groups_of
from spmdrl.dataflow.samples.balancing.balance import most_groups_each
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import rule_of
from spmdrl.dataflow.stages.critic_states import CriticUpdateStage
from spmdrl.dataflow.stages.inference import score_stages
from spmdrl.dataflow.stages.rows import token_rows
from spmdrl.dataflow.stages.stages import Stage
from spmdrl.dataflow.stages.update import UpdatePlan, UpdateStage
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.engines.training.packed_rows import MicroBatch
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.replica import engine_decoder
from spmdrl.job.model.role_models import build_trainer
from spmdrl.job.start.checked_run import CheckedRun, agreement_of
from spmdrl.nouns.batch import Batch, Integers, offsets_of
from spmdrl.nouns.roles import CRITIC, POLICY, Role, WorkerState
from spmdrl.observability.metrics import Recorder
from spmdrl.plan.account import GRADIENTS, ROWS, TRANSIENT, Account, Span
from spmdrl.plan.planned_device import set_memory
from spmdrl.resources.mesh import build_generation_mesh, join_update_mesh
from spmdrl.resources.world import World

# Memory and work repeat from here on: a pass holds no more than its pipeline has stages, and one adds to gradients.
_PASSES_WITHOUT_PIPELINE = 2


@dataclass(frozen=True)
class RowLengths:
    """Tokens of each row."""

    prompt: int
    response: int


@dataclass(frozen=True)
class SlotTrace:
    """Trace of a worker state with a model."""

    role: Role
    span: Span
    num_passes: int
    """micro-batches of the whole slot"""
    num_traced: int
    """micro-batches that ran"""
    num_present: int
    """micro-batches whose rows are on the device at once, if all run"""


@dataclass(frozen=True)
class RankTrace:
    """Trace of one rank."""

    rank: int
    held: Mapping[str, int]
    """bytes by owner, of all models that are trained or score"""
    slots: Mapping[WorkerState, SlotTrace]


class PlannedSamples:
    """Rows of this rank as each state would take them, with all columns that it reads."""

    step = 1

    def __init__(self, checked: CheckedRun, vocab_size: int, lengths: RowLengths, num_rows: int, *, num_experts: int):
        self.group_size = checked.config.rollout.num_generations
        self.num_all = num_rows
        self.rows = self
        self.to_train: Integers = np.arange(num_rows)
        self._needs = checked.needs
        self._vocab_size, self._lengths = vocab_size, lengths
        self._widths = {"routed_experts": num_experts, "reward_parts": 0}
        top = checked.algorithm.num_likeliest
        self._widths |= {"teacher_top_ids": top, "teacher_top_logprobs": top + 1}

    @property
    def groups_to_train(self) -> Integers:
        return np.unique(self.to_train // self.group_size)

    def keep(self, rows: Iterable[int]) -> None:
        """Keep these rows only."""
        self.to_train = np.array(sorted(rows), dtype=np.int64)

    def reads(self, state: WorkerState) -> frozenset[str]:
        return self._needs[state]

    def ready_portions(self, state: WorkerState) -> list[Integers]:
        return [self.to_train]

    def take(self, state: WorkerState, names: Iterable[str] | None = None, *, among: Integers | None = None) -> Batch:
        rows = torch.from_numpy(self.to_train)
        batch = Batch(rows)
        prompts, responses = (
            (first[:, None] + torch.arange(length)) % self._vocab_size
            for first, length in (
                (rows // self.group_size * 31, self._lengths.prompt),
                (rows * 17 + 1, self._lengths.response),
            )
        )
        for name, tokens in (("prompt_ids", prompts), ("response_ids", responses)):
            batch.put_ragged(name, tokens.flatten().int(), _offsets(len(rows), tokens.shape[1]))
        for name in frozenset(self._needs[state] if names is None else names) - {"prompt_ids", "response_ids"}:
            self._put(batch, name)
        return batch

    def _put(self, batch: Batch, name: str) -> None:
        rule, size = rule_of(name), len(batch)
        if not rule.column.ragged:
            return batch.put_dense(name, torch.ones(size, dtype=rule.column.dtype))
        width = self._lengths.response if rule.length_of else self._lengths.response * self._widths.get(name, 1)
        if name == "routed_experts":
            width = self._widths[name] * (self._lengths.prompt + self._lengths.response - 1)
        batch.put_ragged(name, torch.ones(size * width, dtype=rule.column.dtype), _offsets(size, width))

    def put(self, *_: Any) -> None:
        """Drop the columns that a state made: later ones take planned columns."""

    commit = put


def _offsets(num_rows: int, width: int) -> torch.Tensor:
    return offsets_of([width] * num_rows)


class TracedRank:
    """One rank's engines on a planned device; made inside `planned_device`."""

    def __init__(
        self, checked: CheckedRun, sources: Mapping[Role, ModelSource], world: World, account: Account, *,
        is_whole: bool = False,
    ):  # fmt: skip
        """Build the engines. All micro-batches are traced if it `is_whole`."""
        self._is_whole = is_whole
        self._checked, self._world, self._account = checked, world, account
        self.engines: dict[Role, TrainingEngine] = {}
        self.held: Counter[str] = Counter()
        for role, source in sources.items():
            mesh = join_update_mesh(checked.layout_of(role), world.device, world.rank)
            if role.engine != "training" or mesh is None:
                continue
            with account.own("buffers"):
                engine = self.engines[role] = build_trainer(checked, role, source, mesh, world.device)
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
        num_traced = min(len(passes), self._most_passes(engine))
        samples.keep([row for members in passes[:num_traced] for row in members])
        epochs = config.train.epochs_per_step if state.work == "train" else 1
        with self._account.span(lambda owner: owner not in TRANSIENT) as span:
            stage(cast(Samples, samples))
        is_listed = state.work == "train" or engine.mesh.pipeline.size > 1
        num_present = len(passes) if is_listed else num_traced
        return SlotTrace(role, span, len(passes) * parts * epochs, num_traced, num_present)

    def _most_passes(self, engine: TrainingEngine) -> int:
        layout = engine.mesh.layout
        if self._is_whole:
            return 1 << 30
        if layout.pipeline == 1:
            return _PASSES_WITHOUT_PIPELINE
        # It holds all micro-batches of an update.
        if layout.pipeline_schedule == "gpipe":
            return 1 << 30
        return layout.pipeline * layout.pipeline_chunks + 1

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


# Steps that fill prompts, at most, and those that decode.
_MOST_STEPS = 3


def trace_generation(
    checked: CheckedRun, source: ModelSource, world: World, account: Account, lengths: RowLengths, *,
    total_bytes: int, kept_bytes: int,
) -> tuple[Counter[str], Span]:  # fmt: skip
    """Wake the native engine of a rank that generates beside `kept_bytes` of other owners, and run its first steps.

    Returns the bytes that it holds, by owner. Raises NoRoom.
    """
    config = checked.config
    _, generating = checked.sets_of(world.size)
    layout = config.resources.generation
    layout = replace(layout, tensor_stride=layout.tensor_stride or 1)
    mesh = build_generation_mesh(layout, world.device, len(generating), world.rank, first=generating[0])
    dtype = compute_dtype(config.model, world.device.kind)
    records = config.train.routing.replay == "rollout" and source.decoder.moe is not None
    with account.own("generation_weights"):
        engine = NativeEngine(
            engine_decoder(source), config.rollout, world.device.torch_device, dtype, mesh=mesh,
            recorder=ChoiceRecorder() if records else None,
        )  # fmt: skip
        engine.wake_weights()
    num_groups = most_groups_each(config.rollout.prompts_per_step + config.rollout.extra_prompts, len(mesh.replicas))
    size, vocab_size = config.rollout.num_generations, source.decoder.vocab_size
    sampling = config.rollout.sampling(())
    requests = [
        Request(
            tuple(range(group * size, group * size + size)),
            tuple((group * 31 + place) % vocab_size for place in range(lengths.prompt)),
            tuple(range(size)),
            sampling,
        )
        for group in range(min(num_groups, config.rollout.max_running_rows))
    ]
    set_memory(total_bytes - kept_bytes - account.held["generation_weights"], total_bytes)
    with account.own("kv_cache"):
        try:
            engine.wake_cache()
            engine.submit(requests)
        except ValueError as error:
            raise NoRoom(str(error)) from error
    held = Counter({owner: account.held[owner] for owner in ("generation_weights", "kv_cache")})
    with account.span(lambda owner: owner not in TRANSIENT) as span:
        for _ in range(_MOST_STEPS):
            engine.step()
        engine.abort()
    return held, span


class NoRoom(ValueError):
    """Too little memory for the KV cache of one row."""
