"""The store through which ranks find each other before there is a process group.

Rank 0 keeps it behind its gate, so that only ranks with the job's secret can read or change it, and each attempt of a
job has its own. The launcher's store, open to anyone, only holds the address of rank 0's gate; if anything else is
written there, no gate behind it can prove that it holds the secret.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from spmdrl.observability.terminal.console import Console
from spmdrl.runtime.launch import LaunchEnvironment, StartRefused
from spmdrl.runtime.network.gate import STORE, Address, Gate, Target
from spmdrl.runtime.network.link import NoSecret
from spmdrl.runtime.network.network_interface import choose_interface
from spmdrl.runtime.network.secret import VARIABLE, read_or_make_secret, secret_file
from spmdrl.runtime.network.sockets import LOOPBACK, Door

_GATE_KEY, _TRUSTED_KEY = "spmdrl/gate", "spmdrl/trusted"
_PAUSE_SECONDS = 0.1
# Time for which another secret is tolerated: an earlier attempt's rank 0 or a stranger may have been faster.
_DOUBT_SECONDS = 10.0
_PORT_OPTIONS = {
    "srun": ": export MASTER_PORT=N before srun",
    "msrun": ": msrun --master_port=N, above which ranks take the next one",
}
_TRUSTED = (
    "resources.trusted_network is true: anyone who reaches this job's ports can run code in it and change its rows; "
    "only a firewall protects it"
)


@dataclass(frozen=True)
class Network:
    """Network settings of the connections between ranks."""

    folder: Path | None = None
    """the run's folder, if nodes share the job's secret"""
    trusted: bool = False
    """true if every host that can connect is trusted"""


@dataclass(frozen=True)
class Meeting:
    """Connections of ranks before they have a process group."""

    store: dist.Store
    gate: Gate | None = None
    """None for a job of one rank, and on a trusted network"""
    address: str = LOOPBACK
    """address of this host, on the network that nodes share"""
    beside: dist.Store | None = None
    """on rank 0, a second connection to the store; others reach theirs by the gate"""


def meet_at_store(launch: LaunchEnvironment, timeout: timedelta, network: Network) -> Meeting:
    """Reach the job's store; a single rank has one of its own, which opens no port.

    Raises StartRefused if it can't be reached in time, if this rank has another secret than rank 0, or if strangers
    can't be kept out here.
    """
    try:
        host = choose_interface(launch, trusted=network.trusted)
        if launch.world_size == 1:
            return Meeting(dist.HashStore())
        if network.trusted:
            return Meeting(_plain_store(launch, timeout))
        path = secret_file(network.folder if launch.num_nodes > 1 else None)
        secret = read_or_make_secret(path)
    except ValueError as error:
        raise StartRefused(str(error)) from error
    gate = Gate(secret, launch.rank)
    try:
        if launch.rank == 0:
            store, beside = _host_store(gate, launch, host, timeout)
            return Meeting(store, gate, host, beside)
        # On rank 0's node its name may be a loopback address, at which the gate doesn't listen.
        master = replace(launch, master_addr=host) if launch.node_rank == 0 and not _launcher_has_store() else launch
        return Meeting(_join_store(gate, master, timeout, path), gate, host)
    except BaseException:
        gate.close()
        raise


def _plain_store(launch: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    if launch.rank == 0:
        Console().note(_TRUSTED)
    with _explained(launch, timeout):
        # Not env://, as torchrun alone sets MASTER_ADDR and MASTER_PORT.
        host = f"[{launch.master_addr}]" if ":" in launch.master_addr else launch.master_addr
        url = f"tcp://{host}:{launch.master_port}"
        store, _, _ = next(dist.rendezvous(url, launch.rank, launch.world_size, timeout=timeout))
    if launch.rank == 0:
        store.set(_TRUSTED_KEY, "")
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check([_TRUSTED_KEY]) and time.monotonic() < deadline:
        if store.check([_GATE_KEY]):
            raise StartRefused(_disagreement(launch.rank, trusted=True))
        time.sleep(_PAUSE_SECONDS)
    # The launcher's store outlives its ranks.
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def _host_store(gate: Gate, launch: LaunchEnvironment, host: str, timeout: timedelta) -> tuple[dist.Store, dist.Store]:
    """On rank 0, make a store on loopback behind its gate, where the others look for it; returns two connections."""
    with socket.socket() as bound:
        bound.bind((LOOPBACK, 0))
        port = bound.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach(), timeout=timeout
        )
    # As long as the port is open, to which only the gate connects later.
    beside = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    gate.lead_to(STORE, closed_door(port, launch))
    if _launcher_has_store():
        address = gate.listen(host)
        board = _launchers_store(launch, timeout)
        threading.Thread(target=_announce, args=(gate, address, board, launch), name="announce", daemon=True).start()
    else:
        try:
            gate.listen(host, launch.master_port)
        except OSError as error:
            raise StartRefused(
                f"rank 0 can't listen at {host}, MASTER_PORT {launch.master_port}: {error}; "
                f"choose another port{_PORT_OPTIONS.get(launch.source, '')}"
            ) from error
    return store, beside


def closed_door(port: int, launch: LaunchEnvironment) -> Door:
    """Return a door on a port of loopback; if this system can't close it, an open one, but only on one node."""
    try:
        return Door(port)
    except OSError as error:
        if launch.num_nodes > 1:
            raise StartRefused(
                f"this system can't keep strangers from the job's ports ({error}), which several nodes need; run on "
                "Linux, or set resources.trusted_network to true where a firewall keeps strangers out"
            ) from error
        Console().note(f"other users of this machine can connect to this job: {error}")
        return Door(port, is_closed=False)


def _announce(gate: Gate, address: Address, board: dist.Store, launch: LaunchEnvironment) -> None:
    """Republish the gate's address until every rank has joined, as others may write there too."""
    with contextlib.suppress(RuntimeError):
        while gate.is_open and not gate.has_admitted(launch.world_size - 1):
            board.set(_GATE_KEY, f"{address.host} {address.port}")
            time.sleep(_PAUSE_SECONDS)


def _join_store(gate: Gate, launch: LaunchEnvironment, timeout: timedelta, path: Path) -> dist.Store:
    board = _launchers_store(launch, timeout) if _launcher_has_store() else None
    deadline = time.monotonic() + timeout.total_seconds()
    doubted_since: float | None = None
    # Rank 0's gate without a launcher's store; loopback on one node.
    at_masters_port = Address(LOOPBACK if launch.num_nodes == 1 else launch.master_addr, launch.master_port)
    while True:
        if board is not None and board.check([_TRUSTED_KEY]):
            raise StartRefused(_disagreement(launch.rank, trusted=False))
        problem = "it hasn't written where it listens"
        address = _announced(board) if board else at_masters_port
        if address is not None:
            target = Target(address, 0, STORE)
            try:
                gate.check(target)
                return dist.TCPStore(LOOPBACK, gate.way_to(target), is_master=False, timeout=timeout)
            except NoSecret:
                doubted_since = doubted_since or time.monotonic()
                if time.monotonic() > min(doubted_since + _DOUBT_SECONDS, deadline):
                    raise StartRefused(_other_secret(launch.rank, address, path)) from None
                problem = "it has another secret"
            except (OSError, RuntimeError) as error:
                doubted_since = None
                problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        if time.monotonic() > deadline:
            raise StartRefused(
                f"rank {launch.rank} doesn't reach rank 0 within {timeout.total_seconds():g} s: {problem}; look at "
                f"rank 0's output, and check MASTER_ADDR {launch.master_addr} and MASTER_PORT {launch.master_port}"
            )
        time.sleep(_PAUSE_SECONDS)


def _disagreement(rank: int, *, trusted: bool) -> str:
    """Return the refusal for ranks that would wait for each other in two places."""
    mine, other = ("true", "false") if trusted else ("false", "true")
    return (
        f"ranks disagree about resources.trusted_network: {other} on rank 0, {mine} on rank {rank}; "
        "start all ranks with the same command, files and installation"
    )


def _other_secret(rank: int, address: Address, path: Path) -> str:
    return (
        f"rank {rank} reads the job's secret from {path}, but what listens for rank 0 at {address.host}:{address.port} "
        "has another one, or another resources.trusted_network; all ranks must read the same file: give them the same "
        f"run.dir on a file system that they share, or {VARIABLE}=/path/to/file"
    )


def _announced(board: dist.Store) -> Address | None:
    """Read the published address of rank 0's gate; None for anything that can't be an address."""
    if not board.check([_GATE_KEY]):
        return None
    host, _, port = board.get(_GATE_KEY)[:256].decode(errors="replace").partition(" ")
    return Address(host, int(port)) if port.isascii() and port.isdigit() and int(port) < 1 << 16 else None


def _launcher_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _launchers_store(launch: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    # Loopback on one node, whatever the host is called.
    host = LOOPBACK if launch.num_nodes == 1 else launch.master_addr
    with _explained(launch, timeout):
        return dist.TCPStore(host, launch.master_port, is_master=False, timeout=timeout)


@contextlib.contextmanager
def _explained(launch: LaunchEnvironment, timeout: timedelta) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StartRefused(
            f"rank {launch.rank} finds no store at MASTER_ADDR {launch.master_addr}, MASTER_PORT {launch.master_port} "
            f"within {timeout.total_seconds():g} s ({reason}); check that rank 0 runs there, with the same "
            "resources.trusted_network, and that nothing else listens on the port"
        ) from error
