"""A rank whose memory runs out in the middle of a pass stays in step with the others, and the pass is done again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spmdrl.engines.training import parallelize
from spmdrl.engines.training.microbatch import MemoryRanOut
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.world import World
from tests.engines.training.tiny import make_engine, make_rows, weighted_nll, whole_weights
from tests.support.ranks import run_ranks

MAX_TOKENS = 20
SHARING = ("tensor", "context", "pipeline")


class Refusing(torch.autograd.Function):
    """Its backward pass finds no memory, once."""

    left = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Refusing.left -= 1
        if Refusing.left >= 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return gradient


def refuse(engine: TrainingEngine, passes: set[int]) -> None:
    """Have the last layer find no memory the first, second, ... time that it runs."""
    layer, count = engine.model.decoders[0].layers[-1], [0]

    def hook(module: nn.Module, arguments: Any, named: Any) -> None:
        count[0] += 1
        if count[0] in passes:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")

    layer.register_forward_pre_hook(hook, with_kwargs=True)


def updated_and_scored(world: World, layout: UpdateLayout, max_tokens: int, passes: set[int]) -> Any:
    engine = make_engine(world, layout=layout, max_tokens=max_tokens)
    notes = list[str]()
    engine.fitted.limit.when_halved = notes.append
    if passes and world.rank == world.size - 1:
        refuse(engine, passes)
    rows = make_rows().select([[0, 1, 2], [3, 4, 5, 6]][world.rank] if world.size == 2 else list(range(7)))
    results = [engine.update(rows, weighted_nll) for _ in range(2)]
    weights = {name: tensor.clone() for name, tensor in whole_weights(engine).items()}
    return results, weights, engine.score(rows).logprobs_R, notes


def compare(world: World, layout: UpdateLayout, passes: set[int]) -> list[str]:
    """What a disturbed engine does beside one that began with half the tokens; returns what was noted."""
    results, weights, logprobs_R, notes = updated_and_scored(world, layout, MAX_TOKENS, passes)
    halved = MAX_TOKENS >> len(notes)
    expected, expected_weights, expected_R, _ = updated_and_scored(world, layout, halved, set())
    assert results == expected
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())
    assert torch.equal(logprobs_R, expected_R)
    return notes


def disturb_all(world: World) -> list[list[str]]:
    notes = [compare(world, layout, {1}) for layout in (UpdateLayout(shard=2), UpdateLayout(data=2, shard=1))]
    notes.append(compare(world, UpdateLayout(shard=2), {2}))
    # Larger models are several units, of which each is reduced in its turn.
    parallelize.ONE_UNIT_BYTES = 0
    engine = make_engine(world, layout=UpdateLayout(shard=2), max_tokens=MAX_TOKENS)
    refuse(engine, {1})
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        engine.update(make_rows(), weighted_nll)
    return notes


@pytest.mark.ranks
def test_two_ranks_do_a_pass_again_in_which_one_ran_out():
    first, second = run_ranks(2, disturb_all, timeout=120)
    assert [len(notes) for notes in first] == [len(notes) for notes in second] == [1, 1, 1]
    assert all("rank 1 ran out of memory" in notes[0] for notes in first)


def run_out_in_backward(world: World) -> tuple[Any, Any, int]:
    engine, plain = (make_engine(world, layout=UpdateLayout(data=2), max_tokens=tokens) for tokens in (40, 20))
    if world.rank == 1:
        Refusing.left = 1
        layer = engine.model.decoders[0].layers[-1]
        layer.register_forward_hook(lambda module, inputs, output: Refusing.apply(output))
    rows = make_rows().select([[0, 1, 2], [3, 4, 5, 6]][world.rank])
    return engine.update(rows, weighted_nll), plain.update(rows, weighted_nll), engine.fitted.limit.num_halvings


def stays_in_step(world: World) -> dict[str, tuple[bool, bool]]:
    """By axis, whether a rank of its two that runs out in a forward pass, or a backward pass, stays in step."""
    layouts = {axis: UpdateLayout(**({"shard": 1} | {axis: 2})) for axis in ("data", "shard", *SHARING)}
    layouts["expert"] = UpdateLayout(shard=2, expert=2)
    models = {axis: make_engine(world, layout=layout).model for axis, layout in layouts.items()}
    return {axis: (model.forwards_alone, model.is_plain) for axis, model in models.items()}


@pytest.mark.ranks
def test_ranks_that_share_a_pass_cannot_stay_in_step():
    for found in run_ranks(2, stays_in_step):
        assert (found.pop("data"), found.pop("shard")) == ((True, True), (True, False))
        assert found == dict.fromkeys((*SHARING, "expert"), (False, False))


@pytest.mark.ranks
def test_replicas_do_a_pass_again_in_which_one_ran_out_backwards():
    for result, expected, num_halvings in run_ranks(2, run_out_in_backward, timeout=120):
        assert result == expected and num_halvings == 1


def test_one_rank_does_forward_and_backward_again(world):
    assert len(compare(world, UpdateLayout(), {1})) == 1
    engine, plain = make_engine(world, max_tokens=MAX_TOKENS), make_engine(world, max_tokens=MAX_TOKENS // 2)
    Refusing.left = 1
    layer = engine.model.decoders[0].layers[-1]
    layer.register_forward_hook(lambda module, inputs, output: Refusing.apply(output))
    assert engine.update(make_rows(), weighted_nll) == plain.update(make_rows(), weighted_nll)
    assert engine.fitted.limit.num_halvings == 1


def without_memory(scores: Scores, micro: MicroBatch) -> LossTerms:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_pass_that_never_fits_ends_after_three_halvings(world):
    engine = make_engine(world, max_tokens=MAX_TOKENS)
    with pytest.raises(MemoryRanOut, match="rank 0 ran out of memory"):
        engine.update(make_rows(), without_memory)
    assert engine.fitted.limit.num_halvings == 3 and engine.update_count == 0
