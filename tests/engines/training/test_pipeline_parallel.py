"""A pipelined decoder against the whole one in one process, on gloo ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.training.assignment import layer_spans, stage_numbers, stage_ranks
from spmdrl.engines.training.heads import logprobs_and_entropy
from spmdrl.engines.training.pipeline_runner import PipelineRunner, sum_tied_gradients
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import UpdateMesh, build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.tiny import CONFIG, INDEXED, packed
from tests.support.chosen_device import chosen_device
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

DENSE = replace(CONFIG, intermediate_size=12, num_layers=5, attention_bias=True)
TIED = replace(DENSE, tied_head=True)
DEEP = replace(DENSE, num_layers=9)
# Latent attention and experts bring autograd functions of other kinds.
SPARSE = replace(
    INDEXED,
    num_layers=5,
    moe=MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=8, num_shared_experts=1, dense_layers=(0,)),
)
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2), ("zero_bubble", 1), ("zbv", 2))
NUM_TOKENS = 12


@dataclass(frozen=True)
class Case:
    config: DecoderConfig
    layout: UpdateLayout
    num_microbatches: int


@dataclass(frozen=True)
class Errors:
    """Largest differences to one process, relative to the largest value."""

    loss: float
    gradient: float
    evaluation: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient, self.evaluation)


class Batch:
    """Micro-batches of as many tokens but other rows and contents, the same on every rank."""

    def __init__(self, config: DecoderConfig, seed: int):
        self.config, self.seed = config, seed

    def compute(self, stage: Decoder, inputs: Tensor | None, microbatch: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.seed + microbatch)
        tokens_T = torch.randint(0, self.config.vocab_size, (NUM_TOKENS,), generator=generator).to(chosen_device())
        weights_T = torch.rand(NUM_TOKENS, generator=generator).to(chosen_device())
        first = 3 + microbatch
        positions_T, attend = packed((first, NUM_TOKENS - first))

        def head(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
            logprobs_T, entropy_T = logprobs_and_entropy(hidden_TD, weight_VD, tokens_T.roll(-1))
            return -(weights_T * (logprobs_T + 0.1 * entropy_T)).sum()

        return stage(tokens_T if inputs is None else inputs, positions_T, attend, head)


def fill(decoder: Decoder) -> Decoder:
    """Give every weight values that depend on its name alone."""
    decoder.to_empty(device=chosen_device())
    with torch.no_grad():
        for name, held in decoder.state_dict().items():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            held.copy_(torch.randn(held.shape, generator=generator) * 0.3)
    return decoder


def build(config: DecoderConfig, number: int | None = None, num_stages: int = 1) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config, None if number is None else layer_spans(config.num_layers, num_stages)[number])
    return fill(decoder)


def shard(decoder: Decoder, mesh: UpdateMesh) -> None:
    for module in (*decoder.layers, decoder):
        fully_shard(module, mesh=mesh.dense_shards, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def build_runner(config: DecoderConfig, mesh: UpdateMesh) -> tuple[PipelineRunner, dict[int, Decoder]]:
    num_stages = len(stage_ranks(mesh.layout))
    stages = {number: build(config, number, num_stages) for number in stage_numbers(mesh.pipeline, mesh.layout)}
    if mesh.data.size > 1:
        for decoder in stages.values():
            shard(decoder, mesh)
    return PipelineRunner(stages, mesh.pipeline, mesh.layout, chosen_device()), stages


def expected(config: DecoderConfig, count: int, num_seeds: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Losses by seed and micro-batch, and all gradients of their sum, by one process."""
    whole = build(config)
    losses = [
        [Batch(config, seed).compute(whole, None, number) for number in range(count)] for seed in range(num_seeds)
    ]
    torch.stack([loss for row in losses for loss in row]).sum().backward()
    gradients = {name: weight.grad for name, weight in whole.named_parameters() if weight.grad is not None}
    return [[loss.detach() for loss in row] for row in losses], gradients


def whole_gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad


def stored(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def compare(config: DecoderConfig, mesh: UpdateMesh, count: int) -> Errors:
    """Evaluate, train twice (the gradients add up) and evaluate again; against one process."""
    runner, stages = build_runner(config, mesh)
    losses, gradients = expected(config, count, mesh.data.size)
    compute = Batch(config, mesh.data.rank).compute
    size = (count, (NUM_TOKENS, config.hidden_size), torch.float32)
    evaluated = runner.evaluate(*size, compute)
    found = runner.train(*size, compute)
    evaluated += runner.evaluate(*size, compute)
    runner.train(*size, compute)
    if config.tied_head:
        embeddings = [stage.model.embed_tokens for stage in stages.values() if stage.model.embed_tokens is not None]
        sum_tied_gradients([stored(embedding.weight) for embedding in embeddings], mesh.pipeline)
    own = torch.stack(losses[mesh.data.rank])
    ends = any(stage.span.heads for stage in stages.values())
    assert len(found) == (count if ends else 0) and len(evaluated) == 2 * len(found)
    return Errors(
        loss=difference(torch.stack(found), own) if ends else 0.0,
        gradient=max(
            difference(whole_gradient(weight), 2 * gradients[name])
            for stage in stages.values()
            for name, weight in stage.named_parameters()
            # An indexer's weights have none.
            if name in gradients
        ),
        evaluation=difference(torch.stack(evaluated), own.repeat(2)) if ends else 0.0,
    )


def compare_all(world: World, cases: list[Case]) -> dict[Case, Errors]:
    layouts = dict.fromkeys(case.layout for case in cases)
    meshes = {layout: build_update_mesh(layout, world.device, world.rank) for layout in layouts}
    return {case: compare(case.config, meshes[case.layout], case.num_microbatches) for case in cases}


def layouts_of(**degrees: int) -> list[UpdateLayout]:
    return [
        UpdateLayout(pipeline_schedule=schedule, pipeline_chunks=chunks, **{"shard": 1, **degrees})
        for schedule, chunks in SCHEDULES
    ]


def assert_equal(results: list[dict[Case, Errors]]) -> None:
    wrong = {case: errors for rank in results for case, errors in rank.items() if not errors.worst <= 1e-5}
    assert not wrong


@pytest.mark.parametrize(
    ("config", "num_microbatches"),
    [
        pytest.param(TIED, 1, id="fewer than stages"),
        pytest.param(TIED, 5, id="more, and an odd number"),
        pytest.param(SPARSE, 3, id="experts"),
        pytest.param(TIED, 2, id="as many as stages", marks=pytest.mark.slow),
        pytest.param(TIED, 4, id="an even number", marks=pytest.mark.slow),
        pytest.param(DENSE, 3, id="a head of its own", marks=pytest.mark.slow),
    ],
)
def test_every_schedule_equals_one_process_on_2_ranks(config: DecoderConfig, num_microbatches: int) -> None:
    cases = [Case(config, layout, num_microbatches) for layout in layouts_of(pipeline=2)]
    assert_equal(run_ranks(2, compare_all, cases))


@pytest.mark.slow
def test_every_schedule_equals_one_process_over_fsdp() -> None:
    assert_equal(run_ranks(4, compare_all, [Case(TIED, layout, 3) for layout in layouts_of(pipeline=2, shard=2)]))


@pytest.mark.slow
def test_every_schedule_equals_one_process_on_4_ranks() -> None:
    assert_equal(run_ranks(4, compare_all, [Case(DEEP, layout, 5) for layout in layouts_of(pipeline=4)]))
