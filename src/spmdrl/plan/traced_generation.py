"""The native engine of one rank on a planned device: what it holds, its first steps, and the work of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from spmdrl.dataflow.samples.balancing.balance import most_groups_each
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.replica import engine_decoder, generation_engine_name
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.roles import JUDGE
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.plan.account import TRANSIENT, Account, Message, Span, Work
from spmdrl.plan.planned_device import NAME, set_memory
from spmdrl.plan.planned_rows import RowLengths
from spmdrl.resources.layout import GenerationLayout
from spmdrl.resources.mesh import build_generation_mesh
from spmdrl.resources.world import World

# Steps that fill prompts, at most, and those that decode.
_MOST_STEPS = 3


@dataclass(frozen=True)
class PlannedGenerator:
    """A model that generates rows of a step, and the ranks that it does so on."""

    source: ModelSource
    rollout: RolloutConfig
    layout: GenerationLayout
    ranks: range
    dtype: torch.dtype
    lengths: RowLengths
    weights: str = "generation_weights"
    """owner of its weights"""
    records_routing: bool = False

    @classmethod
    def policy(cls, checked: CheckedRun, source: ModelSource, lengths: RowLengths, num_ranks: int) -> PlannedGenerator:
        config, (_, ranks) = checked.config, checked.sets_of(num_ranks)
        records = config.train.routing.replay == "rollout" and source.decoder.moe is not None
        if generation_engine_name(config.rollout, NAME) == "vllm":
            # It gets whole weights, into which adapters are merged.
            source = replace(source, decoder=replace(source.decoder, lora=None))
        layout, dtype = config.resources.generation, compute_dtype(config.model, NAME)
        rollout = replace(config.rollout, engine_kwargs={}, cuda_graphs=False)
        return cls(source, rollout, layout, ranks, dtype, lengths, records_routing=records)

    @classmethod
    def judge(cls, checked: CheckedRun, source: ModelSource, lengths: RowLengths, num_ranks: int) -> PlannedGenerator:
        """Return the judge, whose questions are taken to have the tokens of a row."""
        rollout, judge = checked.config.rollout, checked.config.reward.judge
        assert judge is not None, "the run has no judge"
        one_each = replace(
            rollout, prompts_per_step=rollout.prompts_per_step * rollout.num_generations, num_generations=1, stop=(),
            temperature=0.0, partial_max_rounds=1, partial_extra_prompts=None, max_completion_length=judge.max_tokens,
            kv_cache_gib=judge.kv_cache_gib, engine_kwargs={}, cuda_graphs=False,
        )  # fmt: skip
        question = min(lengths.prompt + lengths.response, source.decoder.max_positions - judge.max_tokens)
        asked, dtype = RowLengths(question, judge.max_tokens), compute_dtype(checked.config.model, NAME)
        return cls(source, one_each, checked.judge_layout, range(num_ranks), dtype, asked, weights=JUDGE.weights)


def trace_generation(
    planned: PlannedGenerator, world: World, account: Account, *, total_bytes: int, kept_bytes: int
) -> tuple[Counter[str], Span]:  # fmt: skip
    """Wake the native engine of a rank that generates beside `kept_bytes` of other owners, and run its first steps.

    Returns the bytes that it holds, by owner, and what its first steps need with the work of all. Raises NoRoom.
    """
    source, rollout, lengths = planned.source, planned.rollout, planned.lengths
    layout = replace(planned.layout, tensor_stride=planned.layout.tensor_stride or 1)
    mesh = build_generation_mesh(layout, world.device, len(planned.ranks), world.rank, first=planned.ranks[0])
    with account.own(planned.weights):
        engine = NativeEngine(
            engine_decoder(source), rollout, world.device.torch_device, planned.dtype, mesh=mesh,
            recorder=ChoiceRecorder() if planned.records_routing else None,
        )  # fmt: skip
        engine.wake_weights()
    num_groups = most_groups_each(rollout.prompts_per_step + rollout.extra_prompts, len(mesh.replicas))
    asked = PlannedRequests(rollout, lengths, source.decoder.vocab_size)
    set_memory(total_bytes - kept_bytes - account.held[planned.weights], total_bytes)
    with account.own("kv_cache"):
        try:
            engine.wake_cache()
            engine.submit(asked.of(range(min(num_groups, rollout.max_running_rows))))
        except ValueError as error:
            raise NoRoom(str(error)) from error
    held = Counter({owner: account.held[owner] for owner in (planned.weights, "kv_cache")})
    with account.span(lambda owner: owner not in TRANSIENT) as span:
        for _ in range(_MOST_STEPS):
            engine.step()
        engine.abort()
    num_rows = rollout.prompts_per_step * rollout.num_generations / len(mesh.replicas)
    # Rows have half of their responses on average.
    half = max(lengths.response // 2, 1)
    shorter = replace(rollout, kv_cache_gib=None, max_completion_length=half)
    other = NativeEngine(engine_decoder(source), shorter, world.device.torch_device, planned.dtype, mesh=mesh)
    size = rollout.num_generations
    of_group = other.cache_bytes_for(num_groups=1, group_size=size, num_tokens=lengths.prompt + half)
    most_rows = min(num_rows, rollout.max_running_rows, max(held["kv_cache"] * size // of_group, 1))
    span.work, span.messages = _all_steps(engine, asked, account, num_rows, most_rows)
    return held, span


@dataclass(frozen=True)
class PlannedRequests:
    """Requests of the planned lengths."""

    rollout: RolloutConfig
    lengths: RowLengths
    vocab_size: int

    def of(self, groups: Iterable[int]) -> list[Request]:
        """Return these groups' requests."""
        size, sampling = self.rollout.num_generations, self.rollout.sampling(())
        return [
            Request(
                tuple(range(group * size, group * size + size)),
                tuple((group * 31 + place) % self.vocab_size for place in range(self.lengths.prompt)),
                tuple(range(size)),
                sampling,
            )
            for group in groups
        ]


def _all_steps(
    engine: NativeEngine, asked: PlannedRequests, account: Account, num_rows: float, most_rows: float
) -> tuple[Work, Counter[Message]]:  # fmt: skip
    """Return the work and messages of as many rows as a replica has on average, in waves of `most_rows` together.

    Steps that fill the prompts of a few groups are traced, and one that decodes their rows at half of their responses.
    """
    rollout, lengths = asked.rollout, asked.lengths
    size = rollout.num_generations
    filled = max(1, min(rollout.max_prefill_tokens // lengths.prompt, most_rows // size))
    # Other prompts than before, of which the cache has parts.
    engine.submit(asked.of(range(1000, 1000 + int(filled))))
    account.positions = lengths.prompt + lengths.response // 2
    num_filling = -(-int(filled) * lengths.prompt // rollout.max_prefill_tokens)
    # The last step that fills prompts decodes, too.
    with account.span(lambda _: True) as filling:
        for _ in range(num_filling):
            engine.step()
    with account.span(lambda _: True) as decoding:
        engine.step()
    engine.abort()
    prompts, num_waves = num_rows / (filled * size), -(-num_rows // most_rows)
    work = prompts * (filling.work - decoding.work)
    steps, rows = (
        num_waves * (lengths.response - 1),
        num_rows / num_waves / min(filled * size, rollout.max_running_rows),
    )
    one = decoding.work
    # Weights are read once for all rows.
    wider = Work(round(one.flops * rows), 0, one.launches, one.product_bytes)
    wider.num_bytes = wider.product_bytes + round((one.num_bytes - one.product_bytes) * rows)
    messages: Counter[Message] = Counter()
    for found, times, size_of in ((filling, prompts, 1.0), (decoding, steps, rows)):
        for message, count in found.messages.items():
            sent = replace(message, num_bytes=round(message.num_bytes * size_of))
            messages[sent] += max(round(times * count), 1)
    return work + steps * wider, messages


class NoRoom(ValueError):
    """Too little memory for the KV cache of one row."""
