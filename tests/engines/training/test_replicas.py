"""Ranks with whole replicas: plain modules, whose gradients are summed once per update."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spmdrl.engines.training import sharded_model
from spmdrl.engines.training.sharded_model import sum_gradients
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.tiny import make_engine, make_rows, weighted_nll, whole_weights
from tests.support.ranks import run_ranks


def gradients_of(rank: int) -> list[nn.Parameter]:
    """Large, small, turned, missing on one rank, and missing on both."""
    shapes = [(70, 50), (3,), (40, 60), (5, 5), (7,), (1, 2)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for number, one in enumerate(parameters[:4]):
        one.grad = torch.full(one.shape, 1.0 + number + 10 * rank)
    parameters[2].grad = parameters[2].grad.T.contiguous().T
    if rank == 1:
        parameters[3].grad = None
    return parameters


def sum_them(world: World) -> list[float | None]:
    mesh = build_update_mesh(UpdateLayout(data=2, shard=1), world.device, world.rank)
    sharded_model.JOINED_BYTES = 8_000
    parameters = gradients_of(world.rank)
    sum_gradients(parameters, mesh.data)
    assert all(one.grad is None or (one.grad == one.grad.flatten()[0]).all() for one in parameters)
    return [None if one.grad is None else float(one.grad.flatten()[0]) for one in parameters]


@pytest.mark.ranks
def test_gradients_of_all_layouts_are_summed_and_missing_ones_count_as_zeros():
    for sums in run_ranks(2, sum_them):
        assert sums == [12.0, 14.0, 16.0, 4.0, None, None]


def updated(world: World) -> tuple[bool, float, dict[str, torch.Tensor]]:
    engine = make_engine(world, layout=UpdateLayout(data=world.size))
    rows = make_rows()
    share = rows.select(list(range(world.rank, len(rows), world.size)))
    norm = engine.update(share, weighted_nll).grad_norm
    is_plain = not any(isinstance(one, DTensor) for _, one in engine.model.named_parameters())
    return is_plain, norm, {name: tensor.clone() for name, tensor in whole_weights(engine).items()}


@pytest.mark.ranks
def test_replicas_are_plain_and_stay_the_same_bits():
    (is_plain, norm, weights), (_, other_norm, others) = run_ranks(2, updated)
    assert is_plain and norm == other_norm
    assert all(torch.equal(weights[name], other) for name, other in others.items())
    ((_, alone_norm, alone),) = run_ranks(1, updated)
    assert norm == pytest.approx(alone_norm, rel=1e-5)
    for name, whole in alone.items():
        torch.testing.assert_close(weights[name], whole, rtol=0, atol=1e-6)
