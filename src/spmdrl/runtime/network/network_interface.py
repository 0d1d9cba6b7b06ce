"""The network interface that ranks listen on: loopback on one node, a private one on several, never a public one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.network.sockets import LOOPBACK

# Linux: the request for an interface's IPv4 address, and the file with the IPv6 addresses of all interfaces.
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
# For documentation only (RFC 5737): no host has it, so its route is the default one.
_ELSEWHERE = "192.0.2.1"
_WAY_OUT = (
    "set GLOO_SOCKET_IFNAME to the interface of the cluster's private network, or resources.trusted_network to true "
    "where a firewall keeps strangers out"
)


def choose_interface(
    launch: LaunchEnvironment, environ: MutableMapping[str, str] = os.environ, *, trusted: bool = False
) -> str:
    """Point gloo, TensorPipe and NCCL at one interface, unless the user did; returns this host's address there.

    Must come before the first process group. Raises ValueError if an address is public, unless `trusted`.
    """
    gloo = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    tensorpipe = environ.get("TP_SOCKET_IFNAME")
    for name in dict.fromkeys([*gloo, *([tensorpipe] if tensorpipe else [])]):
        if not trusted:
            check_private(address_of_interface(name), name)
    if launch.num_nodes == 1:
        if Path("/sys/class/net/lo").exists():
            _prefer("lo", environ)
        return LOOPBACK
    named = tensorpipe or (gloo[0] if gloo else None)
    address = address_of_interface(named) if named else _address_among_nodes(launch.master_addr, trusted=trusted)
    interface = named or interface_of_address(address)
    if not trusted:
        check_private(address, interface)
    _prefer(interface, environ)
    return address


def _prefer(interface: str, environ: MutableMapping[str, str]) -> None:
    environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environ.setdefault("TP_SOCKET_IFNAME", interface)
    # Without the sign, NCCL takes every interface whose name begins so.
    environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def check_private(address: str, interface: str) -> None:
    """Raise ValueError for an address that hosts outside of the cluster can reach."""
    if ipaddress.ip_address(address).is_global:
        raise ValueError(
            f"ranks would listen on {interface} at {address}, a public address, where anyone may connect; {_WAY_OUT}"
        )


def _address_among_nodes(master: str, *, trusted: bool) -> str:
    """Return this host's address towards the host of rank 0."""
    resolved = _resolved(master)
    if not trusted and ipaddress.ip_address(resolved).is_global:
        raise ValueError(f"MASTER_ADDR {master} is the public address {resolved}, where anyone may connect; {_WAY_OUT}")
    own = address_towards(resolved)
    if ipaddress.ip_address(own).is_loopback and master != resolved:
        # Many systems give their own name a loopback address, which no other node can reach.
        own = address_towards(_ELSEWHERE)
    return own


def _resolved(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR {host} has no address: {error}; set it to an address of rank 0's host"
        ) from error
    return str(found[0][4][0])


def address_towards(host: str) -> str:
    """Return this host's address on the route to another address; no packet is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise ValueError(
                f"no route to {host}: {error}; set GLOO_SOCKET_IFNAME to the interface of the private network"
            ) from error
        return str(probe.getsockname()[0])


def address_of_interface(name: str) -> str:
    """Return a network interface's address as gloo chooses it: its IPv4 address, else its first IPv6 address."""
    with contextlib.suppress(OSError):
        return _ipv4_of_interface(name)
    if addresses := [address for interface, address in _ipv6_addresses() if interface == name]:
        return addresses[0]
    names = ", ".join(known for _, known in socket.if_nameindex())
    raise ValueError(
        f"TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is {name!r}, which has no IP address; this host has: {names}"
    )


def interface_of_address(address: str) -> str:
    """Return the interface that holds an address of this host."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if _ipv4_of_interface(name) == address:
                return name
    for name, held in _ipv6_addresses():
        if held == address:
            return name
    raise ValueError(f"no interface of this host holds {address}; set GLOO_SOCKET_IFNAME to the private interface")


def _ipv4_of_interface(name: str) -> str:
    # Unix only, and only here.
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs."""
    if not _IPV6_ADDRESSES.exists():
        return []
    lines = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
    return [(fields[-1], str(ipaddress.IPv6Address(int(fields[0], 16)))) for fields in lines]
