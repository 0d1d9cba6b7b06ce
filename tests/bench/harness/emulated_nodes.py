"""Network namespaces as nodes: each has one link to a switch, shaped in both directions.

Linux only, as root, with iproute2. The switch is a bridge in a namespace of its own, so the host's network gets no
interface, no address and no route: nothing there can collide, and nothing outside can reach the nodes.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spmdrl.verbs.doctor.commands import sigterm_as_exit

INTERFACE = "link0"
"""of every node; its only one but loopback"""
MAX_NODES = 250
_SWITCH = "switch"
# A burst must hold the largest packet that the kernel hands over whole (64 KiB) and what flows between two timer ticks.
_SHAPE = "burst 512kb latency 50ms"
# Of Linux's sched.h.
_CLONE_NEWNET = 0x40000000
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Node:
    """A namespace that runs processes as a node of its own would."""

    name: str
    address: str
    """private to the nodes"""

    def enter(self) -> None:
        """Move this process to the node: the sockets that it makes from here on are the node's."""
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as namespace:
            if library.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"can't enter the network namespace {self.name}")

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Within the block, its link carries nothing, and nothing at either end closes a connection."""
        owner, _, number = self.name.rpartition("-")
        end = f"ip -n {owner}-{_SWITCH} link set port{number}"
        _run(f"{end} down")
        try:
            yield
        finally:
            _run(f"{end} up")


@dataclass(frozen=True)
class LinkBytes:
    """What went over an interface since it exists, headers included."""

    sent: int
    received: int

    def __sub__(self, earlier: LinkBytes) -> LinkBytes:
        return LinkBytes(self.sent - earlier.sent, self.received - earlier.received)


def link_bytes(interface: str) -> LinkBytes:
    """The counters of an interface of the node on which this process runs. Raises ValueError if it has none such."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            received, sent = (int(counters.split()[place]) for place in (0, 8))
            return LinkBytes(sent, received)
    raise ValueError(f"this node has no interface {interface}")


@contextmanager
def emulated_nodes(count: int, link_bytes_per_second: float) -> Iterator[list[Node]]:
    """Make so many nodes, and remove them at the end, also after an exception, SIGINT or SIGTERM.

    What a process left behind that was killed is removed first. One set of nodes at a time in a process. Raises
    RuntimeError with the system's message where it allows no namespaces.
    """
    if not 1 <= count <= MAX_NODES:
        raise ValueError(f"{count} emulated nodes, but 1 to {MAX_NODES} are possible; choose fewer")
    _remove([name for name in _existing() if not Path(f"/proc/{_owner(name)}").exists()])
    with sigterm_as_exit():
        try:
            yield _make(count, link_bytes_per_second)
        finally:
            # A second signal must not cut the removal short.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            _remove([name for name in _existing() if _owner(name) == os.getpid()])
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def refusal() -> str | None:
    """Why nodes can't be emulated here, found by trying; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"emulated nodes are network namespaces of Linux, but this is {sys.platform}"
    if os.geteuid() != 0:
        return "emulated nodes need root to make network namespaces; run as root, or in a privileged container"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"emulated nodes need {' and '.join(missing)} of iproute2, which isn't installed; install it"
    try:
        with emulated_nodes(1, 1e8):
            return None
    except RuntimeError as error:
        return f"this system permits no emulated nodes: {error}"


def _make(count: int, link_bytes_per_second: float) -> list[Node]:
    switch = _name(_SWITCH)
    _run(f"ip netns add {switch}")
    _run(f"ip -n {switch} link add bridge0 type bridge")
    _run(f"ip -n {switch} link set bridge0 up")
    nodes = [Node(_name(str(number)), f"10.0.0.{number + 1}") for number in range(count)]
    for number, node in enumerate(nodes):
        port = f"port{number}"
        _run(f"ip netns add {node.name}")
        _run(f"ip -n {switch} link add {port} type veth peer name {INTERFACE} netns {node.name}")
        _run(f"ip -n {node.name} address add {node.address}/24 dev {INTERFACE}")
        # Without IPv6 addresses of their own, idle links stay silent, and their counters count what ranks send.
        _run(f"ip -n {node.name} link set {INTERFACE} addrgenmode none")
        for namespace, interface in ((node.name, INTERFACE), (switch, port)):
            rate = f"rate {round(8 * link_bytes_per_second)}bit"
            _run(f"tc -n {namespace} qdisc add dev {interface} root tbf {rate} {_SHAPE}")
        _run(f"ip -n {switch} link set {port} master bridge0 up")
        _run(f"ip -n {node.name} link set {INTERFACE} up")
        _run(f"ip -n {node.name} link set lo up")
    return nodes


def _remove(names: Sequence[str]) -> None:
    """Delete namespaces, and with them the links between them."""
    for name in names:
        # Another process may remove the same leftovers at the same time.
        with suppress(RuntimeError):
            _run(f"ip netns delete {name}")


def _name(part: str) -> str:
    return f"spmdrl-{os.getpid()}-{part}"


def _owner(name: str) -> int:
    """The process that made a namespace."""
    return int(name.split("-")[1])


def _existing() -> list[str]:
    """All namespaces that this module made, whichever process did."""
    listed = [line.split()[0] for line in _run("ip netns list").splitlines() if line]
    return [name for name in listed if re.fullmatch(r"spmdrl-\d+-\w+", name)]


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
