"""This rank's RPC agent: it listens on loopback behind the rank's gate, and runs a closed list of functions."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc

from spmdrl.dataflow.samples.transport.unpickle_guard import install_guard
from spmdrl.resources.startup.rendezvous import closed_door
from spmdrl.resources.world import World
from spmdrl.runtime.network.gate import RPC, Address, Gate, Target
from spmdrl.runtime.network.sockets import LOOPBACK

# TensorPipe bypasses the network between processes that share a kernel. Only its TCP connections, all to the same
# address, can lead through a gate.
PLAIN_TCP: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
_SCHEME = "spmdrl"
_AGENT_PREFIX = b"uv://"
_GATE_PREFIX = b"gate://"

_numbers = itertools.count()
_store: dist.Store | None = None


def join_rpc(
    name: str, world: World, functions: Iterable[Callable[..., Any]], timeout_seconds: float, *, plain_tcp: bool = False
) -> None:
    """Start the agent, which runs only these functions. Collective over all ranks."""
    global _store
    install_guard(functions)
    # All ranks start the same agents in the same order.
    store = dist.PrefixStore(f"rpc/{next(_numbers)}", world.store)
    _store = store if world.gate is None else AgentAddresses(store, world, world.gate)
    # An earlier agent of this process may have registered it.
    with suppress(RuntimeError):
        dist.register_rendezvous_handler(_SCHEME, _rendezvous)
    before = os.environ.get("TP_SOCKET_IFNAME")
    if world.gate is not None:
        os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=timeout_seconds,
        init_method=f"{_SCHEME}://",
        **(PLAIN_TCP if plain_tcp or world.gate is not None else {}),
    )
    try:
        with warnings.catch_warnings():
            # PyTorch's own start-up of RPC calls a collective in a way that PyTorch deprecates.
            warnings.filterwarnings("ignore", message="You are using a Backend")
            rpc.init_rpc(name, rank=world.rank, world_size=world.size, rpc_backend_options=options)
    finally:
        if before is not None:
            os.environ["TP_SOCKET_IFNAME"] = before


def leave_rpc(world: World, *, graceful: bool, timeout_seconds: float) -> None:
    """Stop the agent. Collective over all ranks if `graceful`."""
    global _store
    try:
        rpc.shutdown(graceful=graceful, timeout=timeout_seconds)
    finally:
        _store = None
        if world.gate is not None:
            world.gate.forget(RPC)


def _rendezvous(url: str, **_: object) -> Iterator[tuple[dist.Store, int, int]]:
    assert _store is not None, "an agent starts by join_rpc"
    yield _store, -1, -1


class AgentAddresses(dist.Store):
    """Store for agents' addresses, in which others read a way to the agent through the gates."""

    def __init__(self, store: dist.Store, world: World, gate: Gate):
        super().__init__()
        self._inner: Any = store  # PyTorch's stub has neither `timeout` nor values of bytes.
        self._world = world
        self._gate = gate
        self._address = gate.listen(world.address)

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        if content.startswith(_AGENT_PREFIX):
            content = self._behind_gate(content)
        self._inner.set(key, content)

    def get(self, key: str) -> bytes:
        content = bytes(self._inner.get(key))
        if not content.startswith(_GATE_PREFIX):
            return content
        rank, agent_port, port, host = content.removeprefix(_GATE_PREFIX).decode().split(" ")
        target = Target(Address(host, int(port)), int(rank), RPC)
        return _AGENT_PREFIX + f"{LOOPBACK}:{self._gate.way_to(target, int(agent_port))}".encode()

    def _behind_gate(self, content: bytes) -> bytes:
        """Close the agent that listens there, and put the way to it in the place of its address."""
        host, _, port = content.removeprefix(_AGENT_PREFIX).decode().rpartition(":")
        assert host == LOOPBACK, f"the agent listens at {host} instead of {LOOPBACK}"
        self._gate.lead_to(RPC, closed_door(int(port), self._world.launch))
        fields = (self._world.rank, port, self._address.port, self._address.host)
        return _GATE_PREFIX + " ".join(map(str, fields)).encode()

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(keys, timeout or self._inner.timeout)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._inner.timeout
