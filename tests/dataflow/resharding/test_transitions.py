"""Switches of real engines between layouts: generators get the trainer's weights, and answer as one rank alone does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.roles import POLICY
from spmdrl.nouns.settings.flow_config import Executor, ReshardConfig
from spmdrl.nouns.settings.model_sizes import ClampedGate, DeltaSizes, KeySizes, LatentConfig, MoeConfig, WindowConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import GenerationLayout, UpdateLayout, check_generation_layout, fit_update_layout
from spmdrl.resources.memory import MemoryLedger
from spmdrl.resources.mesh import GenerationMesh, build_generation_mesh, build_update_mesh
from spmdrl.resources.world import World
from tests.bench.layouts.layout_cases import UnevenWeights
from tests.support.ranks import run_ranks

# Heads for 2, 3 and 4 tensor ranks, and a vocabulary that none of these divides. Sparse ones share their key heads.
DENSE = DecoderConfig(
    model_type="qwen3",
    vocab_size=41,
    hidden_size=12,
    intermediate_size=24,
    num_layers=4,
    num_heads=12,
    num_kv_heads=12,
    head_size=4,
    rms_eps=1e-6,
    rope_theta=10000.0,
    qk_norm=True,
    attention_bias=True,
    tied_head=True,
    max_positions=64,
)
MOE = replace(
    DENSE,
    model_type="qwen3_moe",
    num_heads=8,
    num_kv_heads=2,
    attention_bias=False,
    tied_head=False,
    moe=MoeConfig(num_experts=8, experts_per_token=3, intermediate_size=8, normalize=True, dense_layers=(0,)),
)
LATENT = replace(
    DENSE,
    model_type="deepseek_v3",
    num_heads=4,
    num_kv_heads=4,
    head_size=6,
    qk_norm=False,
    attention_bias=False,
    tied_head=False,
    moe=replace(MOE.moe, scoring="sigmoid", num_shared_experts=1),
    latent=LatentConfig(query_rank=7, key_value_rank=5, plain_size=4, rotary_size=2, value_size=3),
)
# Delta nets and attention both have fewer key heads than four tensor ranks.
HYBRID = replace(
    MOE,
    model_type="qwen3_5_text",
    moe=None,
    rotary_size=2,
    attention_gate=True,
    norm_offset=1.0,
    delta=DeltaSizes((0, 2), num_key_heads=2, num_value_heads=8, key_size=4, value_size=3, conv_width=3),
)
SINKS = replace(
    MOE,
    model_type="gpt_oss",
    qk_norm=False,
    attention_bias=True,
    attention_sinks=True,
    window=WindowConfig(5, layers=(0, 2)),
    moe=replace(MOE.moe, dense_layers=(), bias=True, clamp=ClampedGate(7.0, 1.702)),
)
SHARED_KEYS = replace(
    MOE,
    model_type="gemma4_text",
    moe=None,
    norm_offset=0.0,
    output_norms=True,
    scales_layers=True,
    window=WindowConfig(5, layers=(0, 2)),
    full=KeySizes(head_size=6, num_kv_heads=1, are_values=True),
)
MODELS = {
    "dense": DENSE,
    "moe": MOE,
    "latent": LATENT,
    "hybrid": HYBRID,
    "sinks": SINKS,
    "shared keys": SHARED_KEYS,
}


@dataclass(frozen=True)
class Transitions:
    """All pairs of these layouts of one model."""

    model: str
    updates: Sequence[UpdateLayout]
    generations: Sequence[GenerationLayout]

    def __len__(self) -> int:
        return len(self.updates) * len(self.generations)


def fixed(**degrees: int) -> UpdateLayout:
    return UpdateLayout(**{"shard": 1, **degrees})


INTERLEAVED = UpdateLayout(pipeline=2, pipeline_chunks=2, pipeline_schedule="interleaved")
# Tensor up and down, pipeline to data, experts up, down, and to tensor; shards and copies to all of them.
ON_2_RANKS = [
    Transitions(
        "dense",
        [UpdateLayout(), fixed(data=2), fixed(tensor=2), fixed(pipeline=2), INTERLEAVED],
        [GenerationLayout(), GenerationLayout(2)],
    ),
    Transitions(
        "moe",
        [UpdateLayout(expert=2), fixed(tensor=2), fixed(pipeline=2)],
        [GenerationLayout(), GenerationLayout(2), GenerationLayout(expert=2), GenerationLayout(2, expert=2)],
    ),
    Transitions("latent", [UpdateLayout(expert=2)], [GenerationLayout(2), GenerationLayout(expert=2)]),
    Transitions("hybrid", [UpdateLayout(), fixed(tensor=2)], [GenerationLayout(), GenerationLayout(2)]),
    Transitions("sinks", [UpdateLayout(expert=2), fixed(tensor=2)], [GenerationLayout(2), GenerationLayout(expert=2)]),
    Transitions("shared keys", [UpdateLayout(), fixed(tensor=2)], [GenerationLayout(), GenerationLayout(2)]),
]
# The model with latent attention has experts too.
QUICK = ("dense-exact", "hybrid-exact", "latent-allgather")
ON_4_RANKS = [
    Transitions(
        "dense",
        [UpdateLayout(), fixed(tensor=4), UpdateLayout(tensor=2), fixed(pipeline=2, tensor=2), fixed(pipeline=4)],
        [GenerationLayout(), GenerationLayout(2), GenerationLayout(2, tensor_stride=2), GenerationLayout(4)],
    ),
    Transitions(
        "moe",
        [UpdateLayout(expert=4), UpdateLayout(expert=2, tensor=2), fixed(tensor=4)],
        [
            GenerationLayout(4),
            GenerationLayout(expert=2),
            GenerationLayout(expert=4),
            GenerationLayout(2, expert=2),
            GenerationLayout(2, expert=4),
            GenerationLayout(2, expert=4, tensor_stride=2),
        ],
    ),
    Transitions("latent", [UpdateLayout(expert=2, tensor=2)], [GenerationLayout(4), GenerationLayout(2, expert=4)]),
    # Their own cuts are those of tensor ranks; replicas, strides and stages are as of dense and moe.
    Transitions(
        "hybrid",
        [UpdateLayout(), fixed(tensor=4), fixed(pipeline=2, tensor=2), UpdateLayout(context=2)],
        [GenerationLayout(2), GenerationLayout(4)],
    ),
    Transitions(
        "sinks",
        [UpdateLayout(expert=4), UpdateLayout(expert=2, tensor=2), fixed(tensor=4)],
        [GenerationLayout(4), GenerationLayout(expert=4), GenerationLayout(2, expert=4)],
    ),
]
ON_6_RANKS = [
    Transitions(
        "dense", [UpdateLayout(tensor=3), fixed(pipeline=3, data=2)], [GenerationLayout(2), GenerationLayout(3)]
    )
]
ON_8_RANKS = [
    Transitions(
        "dense",
        [fixed(tensor=4, data=2), fixed(tensor=2, pipeline=4), UpdateLayout()],
        [GenerationLayout(2), GenerationLayout(4), GenerationLayout(4, tensor_stride=2)],
    ),
    Transitions(
        "moe",
        [UpdateLayout(expert=8), UpdateLayout(expert=2, tensor=2)],
        [GenerationLayout(expert=8), GenerationLayout(2, expert=8), GenerationLayout(4, expert=4)],
    ),
]


def test_the_matrix_has_forty_transitions_and_more():
    assert sum(map(len, ON_2_RANKS + ON_4_RANKS + ON_6_RANKS)) >= 40


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("transitions", "executor"),
    [
        pytest.param(
            some, executor, id=f"{some.model}-{executor}",
            marks=() if f"{some.model}-{executor}" in QUICK else pytest.mark.slow,
        )
        for some in ON_2_RANKS
        for executor in ("exact", "allgather")
    ],
)  # fmt: skip
def test_on_2_ranks(transitions, executor):
    check_answered(transitions, run_ranks(2, switch_between, transitions, executor))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("transitions", ON_4_RANKS, ids=lambda some: some.model)
def test_on_4_ranks(transitions):
    check_answered(transitions, run_ranks(4, switch_between, transitions, "exact", ranks_per_node=2))


@pytest.mark.ranks
@pytest.mark.slow
def test_on_6_ranks():
    check_answered(ON_6_RANKS[0], run_ranks(6, switch_between, ON_6_RANKS[0], "exact"))


@pytest.mark.ranks
@pytest.mark.skipif("SPMDRL_MOST_RANKS" not in os.environ, reason="SPMDRL_MOST_RANKS=8 starts 8 ranks")
@pytest.mark.parametrize("transitions", ON_8_RANKS, ids=lambda some: some.model)
def test_on_8_ranks(transitions):
    check_answered(transitions, run_ranks(8, switch_between, transitions, "exact", timeout=300))


def check_answered(transitions: Transitions, ranks: list[list[set[int]]]) -> None:
    """Every transition ended with answers to all rows of all replicas; what they say was compared on the ranks."""
    assert [len(answered) for answered in ranks] == [len(transitions)] * len(ranks)
    for number, answered in enumerate(zip(*ranks, strict=True)):
        generation = transitions.generations[number % len(transitions.generations)]
        requests = requests_of(*range(len(ranks) // generation.tensor))
        assert set().union(*answered) == {row for request in requests for row in request.rows} != set()


def switch_between(world: World, transitions: Transitions, executor: Executor) -> list[set[int]]:
    """The rows that this rank answered after each transition, as one rank with whole weights answers them."""
    answered = []
    config = MODELS[transitions.model]
    alone = NativeEngine(config, RolloutConfig(), world.device.torch_device, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        for update in transitions.updates:
            layout = fit_update_layout(update, world.size)
            mesh = build_update_mesh(layout, world.device, world.rank)
            trainer = TrainingEngine(config, TrainingConfig(), OptimConfig(), mesh, world.device)
            trainer.load(StrongWeights(config))
            whole = {name: weight.clone() for name, weight in trainer.whole_weights(torch.float32)}
            expected = tokens_of(alone, whole)
            for number, generation in enumerate(transitions.generations):
                check_generation_layout(generation, world.size)
                generating = build_generation_mesh(generation, world.device, world.size, world.rank)
                switch = Switch(world, trainer, generating, config, executor, Path(folder))
                # A trainer that has come back is as good as new, whatever it had become.
                answered.append(switch.check(whole, expected, times=1 if number else 2))
    return answered


class StrongWeights(UnevenWeights):
    """Uneven weights with larger matrices, so that the next token depends on those before."""

    def read(self, wanted: WeightSlice) -> Tensor:
        return super().read(wanted) * (4 if len(wanted.shape) > 1 else 1)


class Switch:
    """One trainer that becomes one kind of generator."""

    def __init__(
        self, world: World, trainer: TrainingEngine, mesh: GenerationMesh, config: DecoderConfig, executor: Executor,
        folder: Path,
    ):  # fmt: skip
        self.mesh = mesh
        self.generator = NativeEngine(config, RolloutConfig(), world.device.torch_device, torch.float32, mesh=mesh)
        reshard = ReshardConfig(bucket_bytes=16384, executor=executor, verify=True)
        self.ledger = MemoryLedger()
        self.flow = ReshardingFlow(world, {POLICY: trainer}, self.generator, reshard, self.ledger, folder)

    def check(self, whole: dict[str, Tensor], expected: dict[int, tuple[int, ...]], *, times: int) -> set[int]:
        for _ in range(times):
            self.flow.to_generation()
            slices = self.generator.weight_slices()
            for name, held in self.generator.wake_weights().items():
                wanted = whole[name][slices[name].index_within(whole_slice(name, whole[name].shape))]
                assert torch.equal(held, wanted), (name, slices[name])
            answered = answers(self.generator, requests_of(self.mesh.replica))
            assert answered == {row: expected[row] for row in answered}
            self.flow.start_return()
            self.flow.to_update()
        self.flow.close()
        return set(answered)


def requests_of(*replicas: int) -> list[Request]:
    """Replica 1 has nothing to do, the others have ever more prompts, of several lengths."""
    sampling = SamplingParams(temperature=0.0, max_tokens=7, stop_token_ids=(3,))
    requests = []
    for replica in replicas:
        for number in range(replica + 1 if replica != 1 else 0):
            rows = (100 * replica + 2 * number, 100 * replica + 2 * number + 1)
            requests.append(Request(rows, tuple(range(5, 9 + 3 * number + replica)), rows, sampling))
    return requests


def answers(engine: NativeEngine, requests: Iterable[Request]) -> dict[int, tuple[int, ...]]:
    engine.submit(list(requests))
    tokens: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        tokens |= {response.row: response.token_ids for response in engine.step()}
    return tokens


def tokens_of(engine: NativeEngine, whole: dict[str, Tensor]) -> dict[int, tuple[int, ...]]:
    """What one rank with whole weights answers to all requests."""
    engine.load_weights(whole.items())
    engine.wake_cache()
    tokens = answers(engine, requests_of(*range(8)))
    engine.sleep()
    return tokens
