"""Responses over several steps, with the real dock and native engine: the tokens of a decode that never stopped.

Their rewards are begun in the step in which they end, which may be before the one that trains them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.dataflow.stages import noted
from tests.engines.generation.support import TINY, prompt_of
from tests.support.ranks import run_ranks
from tests.support.tuned import TunedRollout

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.balancing.dealing import groups_of_generation
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.pending import PendingGroups, RoundRules
from spmdrl.dataflow.stages.reward import RewardStage
from spmdrl.dataflow.stages.rollout.generation import GenerationStage
from spmdrl.dataflow.stages.rollout.partial import PartialGenerationStage
from spmdrl.engines.generation.native.native_engine import Lockstep, NativeEngine
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.engines.training.checkpoints.file_writes import written_at_once
from spmdrl.nouns.batch import WorkerState
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.nouns.settings.reward_config import RewardConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.layout import GenerationLayout
from spmdrl.resources.mesh import GenerationMesh, build_generation_mesh
from spmdrl.resources.world import World

WANTED, GROUP_SIZE, NUM_STEPS = 4, 2, 5
AT_ONCE = RoundRules(WANTED, num_steps=NUM_STEPS)
PARTIAL = RoundRules(WANTED, num_extra=4, max_rounds=3, num_steps=NUM_STEPS)
SPARSE = replace(
    TINY, model_type="qwen3_moe", moe=MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=16)
)  # fmt: skip
COLUMNS = ("response_ids", "rollout_logprobs", "versions", "finished", "reward")
SAMPLED = SamplingParams(max_tokens=40, stop_token_ids=(1, 2, 3))
GREEDY = replace(SAMPLED, temperature=0.0)


def text_of(token_ids) -> str:
    return " ".join(map(str, token_ids))


def prompt(serial: int) -> Prompt:
    return Prompt(str(serial), prompt_of(2 + 3 * serial), "", None, {}, "")


def build_engine(world: World, config: DecoderConfig, mesh: GenerationMesh) -> NativeEngine:
    recorder = ChoiceRecorder() if config.moe is not None else None
    rollout = TunedRollout(block_size=4)
    engine = NativeEngine(
        config, rollout, world.device.torch_device, torch.float32, mesh=mesh, recorder=recorder
    )  # fmt: skip
    weights = RandomWeights(config, 0)
    engine.load_weights((name, 4 * weights(name)) for name in engine.weight_shapes())
    engine.wake_cache()
    return engine


class Run:
    """Generation alone, step after step under weights that don't change, though their version does."""

    def __init__(
        self, world: World, config: DecoderConfig, layout: GenerationLayout, rules: RoundRules, sampling: SamplingParams
    ):
        device = world.device.torch_device
        self.mesh = build_generation_mesh(layout, world.device, world.size, world.rank)
        self.engine = build_engine(world, config, self.mesh)
        self.pending = PendingGroups(rules, self.mesh)
        self.recorder = Recorder()
        scoring = RewardConfig(("tests.dataflow.stages.noted:checksum",), isolation="inline")
        self.reward = RewardStage(RewardPool(scoring), scoring, text_of, self.recorder)
        noted.CALLS.clear()
        self.num_scored: list[int] = []
        """rows that this rank's reward function had seen at the end of each step"""
        self.stage = GenerationStage(
            engine=self.engine, mesh=self.mesh, sampling=sampling, seed=4, listeners=[self.reward],
            recorder=self.recorder,
        )  # fmt: skip
        if self.pending.is_used:
            lockstep = Lockstep(self.mesh.expert, device)
            self.stage = PartialGenerationStage(**vars(self.stage), pending=self.pending, lockstep=lockstep)
        self.columns = [*COLUMNS, *(["routed_experts"] if config.moe is not None else [])]
        needs = {
            WorkerState.GENERATION: {"prompt_ids"}, WorkerState.REWARD: {"response_ids"},
            WorkerState.UPDATE: set(self.columns),
        }  # fmt: skip
        self.dock = TransferDock(world, needs, DockConfig(20.0), row_groups=groups_of_generation(self.mesh, device))
        self.deferred: list[int] = []
        self.trained_in: dict[int, int] = {}
        self.rows: dict[tuple[int, int], dict[str, list]] = {}
        """by serial and member, what every rank sees of the rows that were trained"""

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.engine.version = step
            groups = self.pending.of_step(step)
            prompts = [prompt(serial) for serial in groups.serials]
            samples = self.dock.open_batch(step, prompts, GROUP_SIZE, groups.holders)
            self.stage(samples)
            self.reward(samples)
            self.num_scored.append(sum(map(len, noted.CALLS)))
            seen = samples.read(samples.rows.to_train, self.columns)
            lists = {
                name: seen.to_lists(name) if seen.is_ragged(name) else seen.dense(name).tolist() for name in seen.names
            }
            for place, row in enumerate(seen.rows.tolist()):
                serial = groups.serials[row // GROUP_SIZE]
                self.trained_in[serial] = step
                self.rows[serial, row % GROUP_SIZE] = {name: values[place] for name, values in lists.items()}
            samples.take(WorkerState.UPDATE, self.columns)
            samples.commit(WorkerState.UPDATE)
            accounting = self.dock.close_batch(samples)
            assert accounting.num_trained == WANTED * GROUP_SIZE and not accounting.num_dropped
            assert accounting.num_trained + accounting.num_deferred == len(prompts) * GROUP_SIZE
            self.deferred.append(accounting.num_deferred)


def generate(world: World, config, layout, rules, sampling) -> tuple[dict, dict, list, dict]:
    run = Run(world, config, layout, rules, sampling)
    run.steps(1, NUM_STEPS)
    run.dock.close()
    metrics = merge(gather_bytes(encode(run.recorder.drain())))
    totals = {"tokens": metrics["generation/tokens"], "scored": run.num_scored}
    return run.rows, run.trained_in, run.deferred, totals


def generate_and_restart(world: World, folder: Path) -> tuple[dict, list]:
    """Two steps, then a new run that takes up what they pending over."""
    sampled = (TINY, GenerationLayout(), PARTIAL, SAMPLED)
    first = Run(world, *sampled)
    first.steps(1, 2)
    written_at_once(first.pending, folder)
    first.dock.close()
    return first.rows, first.deferred


def go_on(world: World, folder: Path) -> tuple[dict, list]:
    run = Run(world, TINY, GenerationLayout(), PARTIAL, SAMPLED)
    run.pending.read_from(folder)
    run.steps(3, NUM_STEPS)
    run.dock.close()
    return run.rows, run.deferred


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "config", "layout", "sampling", "ranks_per_node"),
    [
        (1, TINY, GenerationLayout(), GREEDY, None),
        (1, TINY, GenerationLayout(), SAMPLED, None),
        (2, TINY, GenerationLayout(), SAMPLED, None),
        (2, TINY, GenerationLayout(), SAMPLED, 1),
        (2, TINY, GenerationLayout(2), SAMPLED, None),
        (1, SPARSE, GenerationLayout(), SAMPLED, None),
        (2, SPARSE, GenerationLayout(expert=2), SAMPLED, None),
    ],
    ids=["greedy", "one rank", "two replicas", "two nodes", "one of two ranks", "experts recorded", "experts spread"],
)
def test_responses_over_several_steps_are_those_of_one_step(ranks, config, layout, sampling, ranks_per_node):
    ((expected, _, _, totals),) = run_ranks(1, generate, config, GenerationLayout(), AT_ONCE, sampling)
    several = run_ranks(ranks, generate, config, layout, PARTIAL, sampling, ranks_per_node=ranks_per_node)
    num_ahead = [
        sum(scored) - step * WANTED * GROUP_SIZE
        for step, scored in enumerate(zip(*(totals["scored"] for *_, totals in several), strict=True), 1)
    ]
    assert min(num_ahead) >= 0 and max(num_ahead) > 0 and num_ahead[-1] == 0, "each is scored once, some ahead"
    for found, trained_in, deferred, drawn in several:
        assert found.keys() == expected.keys() and drawn["tokens"] == totals["tokens"], "nothing is generated in vain"
        assert deferred == [4 * GROUP_SIZE] * (NUM_STEPS - 1) + [0]
        for key, row in found.items():
            assert row["reward"] == noted.checksum([""], [row["response_ids"]])[0]
            for name in row.keys() - {"versions", "rollout_logprobs"}:
                assert row[name] == expected[key][name], (key, name)
            assert row["rollout_logprobs"] == pytest.approx(expected[key]["rollout_logprobs"], abs=1e-3)
            versions, last = row["versions"], trained_in[key[0]]
            assert versions == sorted(versions) and len(versions) == len(row["response_ids"])
            assert last - PARTIAL.max_rounds < min(versions) and max(versions) <= last
        assert max(len(set(row["versions"])) for row in found.values()) == PARTIAL.max_rounds, "no row took all rounds"


@pytest.mark.ranks
@pytest.mark.parametrize("ranks_after", [2, 1])
def test_pending_groups_go_on_after_a_restart(tmp_path, ranks_after):
    whole = run_ranks(2, generate, TINY, GenerationLayout(), PARTIAL, SAMPLED)
    before = run_ranks(2, generate_and_restart, tmp_path)
    after = run_ranks(ranks_after, go_on, tmp_path)
    for rank in range(ranks_after):
        rows, _, deferred, _ = whole[rank]
        (first, first_deferred), (second, second_deferred) = before[rank], after[rank]
        assert first_deferred + second_deferred == deferred
        found, names = first | second, COLUMNS if ranks_after == 2 else ("response_ids", "finished", "reward")
        assert found.keys() == rows.keys()
        for key, row in rows.items():
            assert all(found[key][name] == row[name] for name in names), key
