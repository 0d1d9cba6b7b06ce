"""The generation state on replicas of several ranks, with the real dock and native engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.engines.generation.support import TINY, prompt_of
from tests.support.ranks import run_ranks
from tests.support.tuned import TunedRollout

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.balancing.dealing import groups_of_generation
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.schema import needs_by_state
from spmdrl.dataflow.stages.rollout.generation import GenerationStage
from spmdrl.dataflow.stages.rollout.requests import EndedResponses
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.layout import GenerationLayout
from spmdrl.resources.mesh import build_generation_mesh
from spmdrl.resources.world import World

NUM_PROMPTS, GROUP_SIZE, LENGTH = 5, 2, 3
SPARSE = replace(
    TINY, model_type="qwen3_moe", moe=MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=16)
)  # fmt: skip
COLUMNS = ("response_ids", "rollout_logprobs", "versions", "finished")


class Ended:
    """A listener that keeps the rows whose responses it got, and how many it got at a time."""

    def __init__(self):
        self.rows: list[int] = []
        self.numbers: list[int] = []

    def ended(self, ended: Sequence[EndedResponses]) -> None:
        before = len(self.rows)
        for one in ended:
            rows = [response.row for response in one.by_member.values()]
            assert rows == [one.group * one.group_size + member for member in one.by_member]
            assert one.prompt == prompts()[one.group]
            self.rows += rows
        self.numbers.append(len(self.rows) - before)


def prompts() -> list[Prompt]:
    ids = [prompt_of(2 + 3 * number) for number in range(NUM_PROMPTS)]
    return [Prompt(str(number), prompt_ids, "", None, {}, "") for number, prompt_ids in enumerate(ids)]


def put_together(world: World) -> tuple[list[int], int]:
    """How many responses the listener got at a time, and bytes put of a column, where all rows are equally long."""
    layout, device = GenerationLayout(), world.device.torch_device
    mesh = build_generation_mesh(layout, world.device, world.size, world.rank)
    engine = NativeEngine(TINY, TunedRollout(block_size=4), device, torch.float32, mesh=mesh)
    engine.load_weights((name, RandomWeights(TINY, 0)(name)) for name in engine.weight_shapes())
    engine.wake_cache()
    ended = Ended()
    stage = GenerationStage(
        engine=engine, mesh=mesh, sampling=SamplingParams(max_tokens=LENGTH), seed=3, listeners=[ended],
        recorder=Recorder(),
    )  # fmt: skip
    needs = needs_by_state({"advantages", "rollout_logprobs"})
    dock = TransferDock(world, needs, DockConfig(20.0), row_groups=groups_of_generation(mesh, device))
    stage(dock.open_batch(1, prompts(), GROUP_SIZE))
    num_bytes = sum(by_column["response_ids"] for by_column in dock.volume.put_bytes.values())
    dock.close()
    return ended.numbers, num_bytes


@pytest.mark.ranks
def test_what_ends_in_one_engine_step_is_passed_on_and_put_together():
    ((numbers, num_bytes),) = run_ranks(1, put_together)
    num_rows = NUM_PROMPTS * GROUP_SIZE
    assert numbers == [num_rows]
    assert num_bytes == 4 * num_rows * LENGTH + 8 * (num_rows + 1), "tokens, and the offsets of one put"


def generate(world: World, config: DecoderConfig, layout: GenerationLayout) -> tuple[dict, list[int], dict]:
    """The samples as this rank sees them, the rows that its listener got, and the metrics of all ranks."""
    device = world.device.torch_device
    mesh = build_generation_mesh(layout, world.device, world.size, world.rank)
    engine = NativeEngine(config, TunedRollout(block_size=4), device, torch.float32, mesh=mesh)
    weights = RandomWeights(config, 0)
    engine.load_weights((name, 4 * weights(name)) for name in engine.weight_shapes())
    engine.wake_cache()
    ended, recorder = Ended(), Recorder()
    sampling = SamplingParams(max_tokens=6, stop_token_ids=tuple(range(10)))
    stage = GenerationStage(
        engine=engine, mesh=mesh, sampling=sampling, seed=3, listeners=[ended], recorder=recorder
    )  # fmt: skip
    needs = needs_by_state({"advantages", "rollout_logprobs"})
    dock = TransferDock(world, needs, DockConfig(20.0), row_groups=groups_of_generation(mesh, device))
    num_rows = NUM_PROMPTS * GROUP_SIZE
    samples = dock.open_batch(1, prompts(), GROUP_SIZE)
    stage(samples)
    seen = samples.read(range(num_rows), COLUMNS)
    rows = {name: seen.to_lists(name) if seen.is_ragged(name) else seen.dense(name).tolist() for name in COLUMNS}
    dock.close()
    return rows, ended.rows, merge(gather_bytes(encode(recorder.drain())))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "config", "layout"),
    [
        (2, TINY, GenerationLayout(2)),
        (4, TINY, GenerationLayout(2, tensor_stride=2)),
        (2, SPARSE, GenerationLayout(2)),
        (2, SPARSE, GenerationLayout(expert=2)),
        (4, SPARSE, GenerationLayout(2, expert=4)),
    ],
    ids=["dense", "strided", "experts cut", "experts spread", "experts spread over replicas"],
)
def test_replicas_of_several_ranks_answer_as_one_rank_does(ranks, config, layout):
    ((expected, ended, metrics),) = run_ranks(1, generate, config, GenerationLayout())
    assert sorted(ended) == list(range(NUM_PROMPTS * GROUP_SIZE))
    assert len({*map(tuple, expected["response_ids"])}) > NUM_PROMPTS, "rows must differ for an order to show"
    answers = run_ranks(ranks, generate, config, layout)
    for rank, (rows, own, totals) in enumerate(answers):
        for name in COLUMNS:
            assert rows[name] == (answers[0][0] if name == "rollout_logprobs" else expected)[name], (rank, name)
        assert bool(own) == (layout.place(rank)[1] == 0)
        assert totals["generation/tokens"] == metrics["generation/tokens"]
    assert sorted(row for _, own, _ in answers for row in own) == sorted(ended), "each row is passed on once"
    for found, row in zip(answers[0][0]["rollout_logprobs"], expected["rollout_logprobs"], strict=True):
        assert found == pytest.approx(row, abs=1e-4)
