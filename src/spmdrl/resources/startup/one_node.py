"""torchrun's rendezvous on one node, without the store that torchrun opens on all interfaces, for anyone.

Anyone who reaches torchrun's own store can run code in torchrun, which unpickles what it finds there. One node needs no
such store: the agent has one in its own memory, and ranks meet at rank 0's gate (rendezvous.py).
"""

from __future__ import annotations

import os
import socket
from argparse import Namespace

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registered

from spmdrl.runtime.network.sockets import LOOPBACK
from spmdrl.runtime.supervision.launcher import KEPT_PORT

_BACKEND = "one_node"


class OneNodeRendezvous(RendezvousHandler):
    """The rendezvous of a node with itself; each attempt of the job has a store and a port of its own."""

    def __init__(self, run_id: str):
        self._run_id = run_id
        self._is_closed = False
        self._kept = socket.socket()

    def get_backend(self) -> str:
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        # Kept here, so that no other process is given the port before rank 0 listens at it.
        self._kept.close()
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._kept.bind((LOOPBACK, 0))
        port = self._kept.getsockname()[1]
        os.environ[KEPT_PORT] = str(port)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def keep_to_one_node(arguments: Namespace) -> None:
    """Replace torchrun's rendezvous in its arguments, unless they are about several nodes or name one."""
    if arguments.nnodes not in ("1", "1:1") or arguments.rdzv_endpoint:
        return
    if arguments.standalone or arguments.rdzv_backend == "static":
        registered.register(_BACKEND, lambda parameters: OneNodeRendezvous(parameters.run_id))
        arguments.standalone, arguments.rdzv_backend = False, _BACKEND
