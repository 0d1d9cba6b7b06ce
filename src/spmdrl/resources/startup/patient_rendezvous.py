"""torchrun's rendezvous among several nodes, where a name has no address, and where a node is lost.

torchrun's agent asks its store, which one node keeps, many times a second, and waits for as long as the system takes to
give a connection up: a quarter of an hour where a link is down, in which it doesn't notice that its ranks have ended.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)

from spmdrl.runtime.network.network_interface import address_towards

_DEFAULT_PORT = 29400
_LOOK_SECONDS = 1.0
# For which the other nodes' launchers may take to answer at the end.
_LEAVING_SECONDS = 5.0


def _is_named(head: str) -> bool:
    """Whether torchrun finds by itself that this host is the head."""
    try:
        return _matches_machine_hostname(head)
    except OSError:
        return False


def know_this_node(arguments: Namespace, is_named: Callable[[str], bool] = _is_named) -> None:
    """Fill in what torchrun would derive from this host's name: whether it keeps the store, and its address for others.

    By its address on the way to the endpoint, as the name may have none, or one that others can't reach.
    """
    if arguments.rdzv_backend != "c10d" or not arguments.rdzv_endpoint:
        return
    head, _ = parse_rendezvous_endpoint(arguments.rdzv_endpoint, _DEFAULT_PORT)
    # torchrun itself explains what is wrong with an endpoint.
    with contextlib.suppress(OSError, ValueError):
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(head, None, type=socket.SOCK_DGRAM)}
        own = address_towards(sorted(addresses)[0])
        if ipaddress.ip_address(own).is_loopback:
            return
        arguments.local_addr = arguments.local_addr or own
        settings = _parse_rendezvous_config(arguments.rdzv_conf)
        if own in addresses and "is_host" not in settings and not is_named(head):
            arguments.rdzv_conf = ",".join(filter(None, [arguments.rdzv_conf, "is_host=1"]))


class PatientRendezvous(RendezvousHandler):
    """A rendezvous whose store may stop answering: then no node waits to join, and leaving takes seconds."""

    def __init__(self, inner: RendezvousHandler, leaving_seconds: float = _LEAVING_SECONDS):
        self._inner = inner
        self._leaving_seconds = leaving_seconds
        self._num_waiting = 0
        self._looks_from = 0.0
        self._look: threading.Thread | None = None

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def next_rendezvous(self) -> RendezvousInfo:
        if self._look is not None:
            # Both read and write what is known of the others.
            self._look.join(_LOOK_SECONDS)
        self._num_waiting = 0
        return self._inner.next_rendezvous()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """As of the newest answer, which came a second ago or so where the store answers."""
        if (self._look is None or not self._look.is_alive()) and time.monotonic() > self._looks_from:
            self._looks_from = time.monotonic() + _LOOK_SECONDS
            self._look = _in_background(self._count)
        return self._num_waiting

    def _count(self) -> None:
        # Without the store, whose node has ended or is lost, the ranks end by themselves.
        with contextlib.suppress(Exception):
            self._num_waiting = self._inner.num_nodes_waiting()

    def shutdown(self) -> bool:
        """Returns whether the other nodes' launchers know in time that this one has ended."""
        left: list[bool] = []
        leaving = _in_background(lambda: left.append(self._inner.shutdown()))
        leaving.join(self._leaving_seconds)
        return bool(left and left[0])


def _in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="rendezvous", daemon=True)
    thread.start()
    return thread
