"""Pairs of rows: in one micro-batch whatever the budget, with one gradient under every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmdrl.algorithms.settings.preference_configs import PreferenceConfig
from spmdrl.algorithms.terms.pairs import PAIR, PairTokens, preference_loss
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.test_same_gradient import DENSE, TrainingConfig, TrainingEngine
from tests.engines.training.tiny import OPTIM, make_rows, relative_difference
from tests.support.ranks import run_ranks

NUM_PAIRS = 6


def pair_rows() -> TokenRows:
    rows = make_rows(PAIR * NUM_PAIRS)
    lengths_B = rows.response_offsets.diff()
    signs_B = torch.tensor([1.0, -1.0, -1.0, 1.0] * (NUM_PAIRS // 2))
    return TokenRows(
        rows.tokens_T,
        rows.offsets,
        rows.prompt_lengths_B,
        {"sign": signs_B.repeat_interleave(lengths_B)},
        unit_size=PAIR,
    )


def pair_loss(scores: Scores, micro: MicroBatch) -> LossTerms:
    assert [row + 1 for row in micro.members[::PAIR]] == list(micro.members[1::PAIR])
    tokens = PairTokens(scores.logprobs_R, None, micro.response["sign"], micro.row_of_response_R, micro.num_rows)
    losses = preference_loss(tokens, PreferenceConfig(beta=0.5, sft_coef=0.2)).losses
    return LossTerms(losses.sum() / NUM_PAIRS, {"pairs": (losses.detach().sum(), torch.tensor(float(len(losses))))})


def gradient_of(world: World, layout: UpdateLayout, max_tokens: int) -> tuple[float, int, Tensor]:
    """The loss, the micro-batches and the whole gradient of the same pairs. Collective."""
    mesh = build_update_mesh(layout, world.device, world.rank)
    training = TrainingConfig(max_tokens_per_microbatch=max_tokens)
    engine = TrainingEngine(DENSE, training, OPTIM, mesh, world.device, compute_dtype=torch.float32)
    engine.load(RandomWeights(DENSE, seed=1))
    # Uneven: one pair on the first rank, where two have rows of their own.
    first = PAIR if mesh.data.size > 1 else 0
    mine = list(range(first, PAIR * NUM_PAIRS) if mesh.data.rank == mesh.data.size - 1 else range(first))
    accumulated = engine.accumulate(pair_rows().select(mine), pair_loss)
    whole = engine.model.gather_whole(engine.model.named_gradients(), torch.float32)
    gradient = torch.cat([part.flatten().cpu() for _, part in whole])
    return engine.step(accumulated).loss, accumulated.num_microbatches, gradient


def test_pairs_stay_together_in_any_budget_and_have_one_gradient(world):
    loss, count, expected = gradient_of(world, UpdateLayout(shard=1), 10_000)
    assert count == 1
    for max_tokens in (1, 20, 45):
        found_loss, count, found = gradient_of(world, UpdateLayout(shard=1), max_tokens)
        assert count > 1 and found_loss == pytest.approx(loss, rel=1e-5)
        assert relative_difference(found, expected) < 1e-5, max_tokens


LAYOUTS = {
    "data": UpdateLayout(data=2, shard=1),
    "shard": UpdateLayout(shard=2),
    "tensor": UpdateLayout(shard=1, tensor=2),
    "context": UpdateLayout(shard=1, context=2),
    "pipeline": UpdateLayout(shard=1, pipeline=2),
}


def gradients_of_layouts(world: World) -> dict[str, tuple[float, Tensor]]:
    found = {name: gradient_of(world, layout, 30) for name, layout in LAYOUTS.items()}
    return {name: (loss, gradient) for name, (loss, _, gradient) in found.items()}


@pytest.mark.ranks
def test_pairs_have_one_loss_and_gradient_under_every_layout(world):
    loss, _, expected = gradient_of(world, UpdateLayout(shard=1), 10_000)
    for found in run_ranks(2, gradients_of_layouts):
        for name, (found_loss, gradient) in found.items():
            assert found_loss == pytest.approx(loss, rel=1e-5), name
            assert relative_difference(gradient, expected) < 1e-5, name


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match="3 rows aren't whole units of 2"):
        pair_rows().select([0, 1, 2])
