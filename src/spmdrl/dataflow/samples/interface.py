"""The network interface that RPC listens on: loopback on one node, a private one on several, never a public one."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import MutableMapping

from spmdrl.resources.launch import LaunchEnvironment
from spmdrl.resources.world import keep_to_loopback

# Linux: ask an interface for its IPv4 address.
_SIOCGIFADDR = 0x8915


def listen_privately(launch: LaunchEnvironment, environ: MutableMapping[str, str] = os.environ) -> None:
    """Point gloo and TensorPipe at one interface, unless the user did; a public address is a ValueError."""
    if launch.num_nodes == 1:
        keep_to_loopback(launch)
        return
    chosen = environ.get("TP_SOCKET_IFNAME") or environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = address_of_interface(chosen) if chosen else address_towards(launch.master_addr)
    name = chosen or interface_of_address(address)
    check_private(address, name)
    environ.setdefault("TP_SOCKET_IFNAME", name)
    environ.setdefault("GLOO_SOCKET_IFNAME", name)


def check_private(address: str, name: str) -> None:
    """Refuse an address that hosts outside of the cluster can reach."""
    if ipaddress.ip_address(address).is_global:
        raise ValueError(
            f"the sample flow would listen on {name} at {address}, a public address, where whoever connects could "
            "run code; set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface of the cluster's private network"
        )


def address_towards(host: str) -> str:
    """This host's IPv4 address on the route to `host`; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise ValueError(
                f"no IPv4 route to MASTER_ADDR={host}: {error}; set TP_SOCKET_IFNAME to the private interface"
            ) from error
        return probe.getsockname()[0]


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface."""
    # Unix only, and only several nodes need it.
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            names = ", ".join(known for _, known in socket.if_nameindex())
            raise ValueError(
                f"TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is {name!r}, which has no IPv4 address; this host has: {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def interface_of_address(address: str) -> str:
    """The interface that holds an IPv4 address of this host."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    for _, name in socket.if_nameindex():
        try:
            if address_of_interface(name) == address:
                return name
        except ValueError:
            # An interface without an IPv4 address isn't the one.
            continue
    raise ValueError(f"no interface of this host holds {address}; set TP_SOCKET_IFNAME to the private interface")
