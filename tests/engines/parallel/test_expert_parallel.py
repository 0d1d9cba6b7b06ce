"""Experts spread over ranks against all experts in one place: on paper, then on gloo ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.models.moe import SparseFeedForward
from spmdrl.engines.parallel.expert_parallel import apply_expert_parallel, check_expert_parallel
from spmdrl.engines.parallel.weight_cuts import Parts
from spmdrl.nouns.batch import WeightSlice
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import Axis, build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.tiny import SPARSE, axis_of, fill
from tests.support.chosen_device import chosen_device
from tests.support.ranks import run_ranks

NUM_EXPERTS, WIDTH = SPARSE.moe.num_experts, SPARSE.hidden_size
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
WEIGHTS = ("gate_proj", "up_proj", "down_proj")

# Experts of each rank's tokens. `one_rank`: all go to the first experts, so that other ranks get no rows; `no_tokens`:
# rank 1 has none of its own; `spread`: wherever the router sends them.
CASES = ("spread", "one_rank", "no_tokens")
RUNS = [(case, recompute) for case in CASES for recompute in (False, True)]


class Chosen:
    """A route with given experts."""

    def __init__(self, chosen_TC: Tensor):
        self.chosen_TC = chosen_TC

    def __call__(self, layer: int, scores_TE: Tensor, chosen_TC: Tensor) -> tuple[Tensor, Tensor]:
        return scores_TE, self.chosen_TC


def decoder_for(axis: Axis) -> tuple[Decoder, Parts]:
    with torch.device("meta"):
        decoder = Decoder(SPARSE)
    parts = Parts.of(decoder)
    apply_expert_parallel(decoder, axis, parts)
    return decoder, parts


def sparse_layer(axis: Axis) -> SparseFeedForward:
    """The sparse layer with this rank's slices of weights that are the same on any number of ranks."""
    layer = fill(*decoder_for(axis)).layers[1].mlp
    assert isinstance(layer, SparseFeedForward)
    return layer


def tokens_of(rank: int, case: str) -> Tensor:
    num_tokens = 0 if case == "no_tokens" and rank == 1 else 5 + rank
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(rank)).to(chosen_device())


def run(layer: nn.Module, tokens: Tensor, case: str, *, recompute: bool) -> list[Tensor]:
    """Output, gradient of the tokens and gradient of the router of a loss over these tokens."""
    tokens = tokens.clone().requires_grad_()
    # Experts 0 to 2 for all tokens, the others for none.
    route = (
        Chosen(torch.tensor([[2, 0, 1]], device=tokens.device).expand(len(tokens), -1)) if case == "one_rank" else None
    )
    out = checkpoint(layer, tokens, route, use_reentrant=False) if recompute else layer(tokens, route)
    (out * torch.linspace(0.1, 0.2, WIDTH, device=tokens.device)).square().sum().backward()
    return [out.detach().cpu(), tokens.grad.cpu(), layer.gate.weight.grad.cpu()]


def run_spread(world: World, case: str, recompute: bool) -> tuple[list[Tensor], list[Tensor]]:
    mesh = build_update_mesh(UpdateLayout(shard=world.size, expert=world.size), world.device, world.rank)
    layer = sparse_layer(mesh.expert)
    results = run(layer, tokens_of(world.rank, case), case, recompute=recompute)
    return results, [getattr(layer.experts, name).grad.cpu() for name in WEIGHTS]


def run_all_cases(world: World) -> list[tuple[list[Tensor], list[Tensor]]]:
    return [run_spread(world, case, recompute) for case, recompute in RUNS]


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_spread_experts_equal_experts_in_one_place(num_ranks):
    ranks = run_ranks(num_ranks, run_all_cases)
    for number, (case, _) in enumerate(RUNS):
        layer = sparse_layer(axis_of("expert"))
        counts = [len(tokens_of(rank, case)) for rank in range(num_ranks)]
        whole = run(layer, torch.cat([tokens_of(rank, case) for rank in range(num_ranks)]), case, recompute=False)
        outputs, inputs = whole[0].split(counts), whole[1].split(counts)
        for rank, results in enumerate(ranks):
            (output, by_input, _), by_experts = results[number]
            torch.testing.assert_close(output, outputs[rank], **CLOSE)
            torch.testing.assert_close(by_input, inputs[rank], **CLOSE)
            for name, gradient in zip(WEIGHTS, by_experts, strict=True):
                expected = getattr(layer.experts, name).grad.cpu().chunk(num_ranks)[rank]
                torch.testing.assert_close(gradient, expected, **CLOSE)
        by_router = sum(results[number][0][2] for results in ranks)
        torch.testing.assert_close(by_router, whole[2], **CLOSE)


def test_each_rank_keeps_its_run_of_experts():
    for rank in range(4):
        decoder, parts = decoder_for(axis_of("expert", 4, rank))
        name = "model.layers.1.mlp.experts.down_proj"
        assert decoder.get_parameter(name).shape == (2, WIDTH, 4)
        assert parts.slices[name] == WeightSlice(name, (2 * rank, 0, 0), (2 * rank + 2, WIDTH, 4))
        assert parts.slices["model.layers.1.mlp.gate.weight"].shape == (NUM_EXPERTS, WIDTH)


def test_degrees_that_do_not_divide_the_experts_are_refused():
    check_expert_parallel(SPARSE, 4, "resources.generation.expert")
    with pytest.raises(ValueError, match=r"resources.generation.expert is 3.*8 experts.*\[1, 2, 4, 8\]"):
        check_expert_parallel(SPARSE, 3, "resources.generation.expert")
