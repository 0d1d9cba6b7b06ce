"""How long collectives of a mesh's groups wait: as long as those of the job."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks

from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World


def wait_alone(world: World) -> float:
    """Seconds until a collective of the tensor axis gives up on the other rank."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    mesh = build_update_mesh(UpdateLayout(shard=1, tensor=2, data=2), world.device, world.rank)
    started = time.monotonic()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="(?i)timed out|timeout"):
            mesh.tensor.sum(torch.ones(3))
    seconds = time.monotonic() - started
    # The others must not end, which would end the wait too.
    world.store.add("waited", 1 if world.rank == 0 else 0)
    while world.store.add("waited", 0) == 0:
        time.sleep(0.05)
    return seconds


@pytest.mark.ranks
def test_groups_of_a_mesh_wait_no_longer_than_the_job_allows():
    assert 1.5 < run_ranks(4, wait_alone)[0] < 20
