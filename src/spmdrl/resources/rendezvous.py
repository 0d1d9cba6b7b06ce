"""The store through which ranks find each other before there is a process group."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from spmdrl.resources.launch import LaunchEnvironment, StartRefused


def make_store(launch: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    """The job's store; one rank has one of its own, which opens no port.

    The launcher's store outlives the ranks: it may hold keys of an earlier attempt, see agreement.py.
    Raises StartRefused when it can't be reached in time.
    """
    if launch.world_size == 1:
        return dist.HashStore()
    try:
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StartRefused(
            f"rank {launch.rank} finds no store at MASTER_ADDR {launch.master_addr}, MASTER_PORT {launch.master_port} "
            f"within {timeout.total_seconds():g} s ({reason}); check that rank 0 runs there and that nothing else "
            "listens on the port"
        ) from error
    return store
