"""Collectives along one axis, on gloo ranks, against what one process computes; and where each rank stands."""

import pytest
import torch

from spmdrl.engines.parallel import axis_collectives as along
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.support.ranks import run_ranks


def _mesh(world: World, **degrees: int):
    return build_update_mesh(UpdateLayout(**degrees), world.device, world.rank)


def _places(world: World):
    mesh = _mesh(world, pipeline=2, shard=1, context=2, expert=2)
    return [mesh.pipeline.rank, mesh.data.rank, mesh.context.rank, mesh.expert.rank, mesh.model.ranks]


@pytest.mark.ranks
def test_ranks_stand_where_the_layout_puts_them():
    assert run_ranks(4, _places) == [
        [0, 0, 0, 0, (0, 1, 2, 3)],
        [0, 0, 1, 1, (0, 1, 2, 3)],
        [1, 0, 0, 0, (0, 1, 2, 3)],
        [1, 0, 1, 1, (0, 1, 2, 3)],
    ]


def _expert_places(world: World):
    mesh = _mesh(world, data=2, shard=2, expert=2)
    return [mesh.expert.rank, mesh.expert_shards.size(), mesh.dense_shards.size()]


@pytest.mark.ranks
def test_experts_take_their_ranks_from_the_shards_of_a_replica():
    assert run_ranks(4, _expert_places) == [[0, 2, 4], [1, 2, 4], [0, 2, 4], [1, 2, 4]]


def _sums(world: World):
    """Gradients on each rank of a loss that weighs every gathered, scattered or exchanged row."""
    axis = _mesh(world, shard=1, tensor=world.size).tensor
    device = world.device.torch_device
    own = (torch.arange(4.0, device=device).reshape(4, 1) + 10 * world.rank).requires_grad_()
    gathered = along.gather_rows(own, axis)
    scattered = along.scatter_row_sums(own, axis)
    send = [1, 3] if world.rank == 0 else [2, 2]
    receive = [1, 2] if world.rank == 0 else [3, 2]
    exchanged = along.exchange_rows(own, send, receive, axis)
    uneven = along.gather_own_gradient(own[: 3 + world.rank], [3, 4], axis)
    values = [tensor.detach().flatten().tolist() for tensor in (gathered, scattered, exchanged, uneven)]
    gradients = []
    for tensor in (gathered, scattered, exchanged, uneven):
        weights = (1 + torch.arange(len(tensor), device=device).reshape(-1, 1)) * (1.0 + world.rank)
        (gradient,) = torch.autograd.grad((weights * tensor).sum(), own)
        gradients.append(gradient.flatten().tolist())
    return values, gradients


@pytest.mark.ranks
def test_rows_are_gathered_summed_and_exchanged_with_the_gradients_of_the_whole():
    (values, gradients), (values_1, gradients_1) = run_ranks(2, _sums)
    everything = [0, 1, 2, 3, 10, 11, 12, 13]
    assert values == [everything, [10, 12], [0, 10, 11], everything[:3] + everything[4:]]
    assert values_1 == [everything, [14, 16], [1, 2, 3, 12, 13], everything[:3] + everything[4:]]
    # Rank r weighs place k by (k + 1) * (r + 1): a gathered row's gradient adds up over the ranks.
    assert gradients[0] == [3, 6, 9, 12] and gradients_1[0] == [15, 18, 21, 24]
    assert gradients[1] == [1, 2, 2, 4] and gradients_1[1] == [1, 2, 2, 4]
    assert gradients[2] == [1, 2, 4, 6] and gradients_1[2] == [2, 3, 8, 10]
    assert gradients[3] == [1, 2, 3, 0] and gradients_1[3] == [8, 10, 12, 14]


def _ring(world: World):
    axis = _mesh(world, shard=1, context=world.size).context
    ids = torch.tensor([world.rank, 7], device=world.device.torch_device)
    counts = along.exchange_counts(torch.arange(world.size, device=ids.device) + 10 * world.rank, axis)
    (received,) = along.RingShift([ids], axis).wait()
    total, largest = axis.sum(ids), axis.max(ids)
    return [tensor.tolist() for tensor in (received, counts, total, largest)]


@pytest.mark.ranks
def test_a_ring_shift_brings_what_the_rank_before_held():
    answers = run_ranks(4, _ring)
    for rank, (received, counts, total, largest) in enumerate(answers):
        assert received == [(rank - 1) % 4, 7]
        assert counts == [rank + 10 * source for source in range(4)]
        assert (total, largest) == ([6, 28], [3, 7])
