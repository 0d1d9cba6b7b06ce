"""Doors: listening sockets on loopback that admit this rank's gate only, by the kernel's packet filters.

A filter on a listening socket sees each packet before there is a connection, needs no privilege and exists on every
Linux. Strangers see a filtered port as if no host were there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"

# Linux; Python's socket module doesn't name it.
_SO_ATTACH_FILTER = 26
# Instructions of classic BPF: load a word or half-word, jump if equal, return this many bytes of the packet.
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
# Offsets from here on are in the IPv4 header, others in the TCP header.
_IP_HEADER = 0xFFF00000
_SOURCE_ADDRESS, _SOURCE_PORT = _IP_HEADER + 12, 0
# A jump is at most 255 instructions long.
_MOST_ADMITTED = 250


class Door:
    """A listening socket of this process, on loopback, that admits connections of its gate only."""

    def __init__(self, port: int, *, is_closed: bool = True):
        """Raise OSError if the system can't keep others out, which an open door (`is_closed=False`) doesn't try."""
        self.port = port
        self._is_closed = is_closed
        self._listener = own_listener(port)
        self._admitted: deque[int] = deque(maxlen=_MOST_ADMITTED)
        if is_closed:
            admit_only(self._listener, ())
            # Connections from before the filter.
            end_connections_to(port)
            self._check_is_closed()

    def admit(self) -> socket.socket:
        """Return a socket that may connect to the door; `forget` it at its end."""
        own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        own.bind((LOOPBACK, 0))
        self._admitted.append(own.getsockname()[1])
        self._apply()
        # A small write must not wait for the acknowledgement of the previous one.
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.setblocking(False)
        return own

    def forget(self, port: int) -> None:
        """Close the door to a port of this host that others may get next."""
        with contextlib.suppress(ValueError):
            self._admitted.remove(port)
            self._apply()

    def close(self) -> None:
        self._listener.close()

    def _apply(self) -> None:
        if self._is_closed:
            admit_only(self._listener, self._admitted)

    def _check_is_closed(self) -> None:
        with socket.socket() as stranger:
            stranger.settimeout(0.05)
            if stranger.connect_ex((LOOPBACK, self.port)) == 0:
                raise OSError("this kernel accepts packet filters on sockets, but doesn't apply them")


def admit_only(listener: socket.socket, ports: Collection[int]) -> None:
    """Drop packets in the kernel unless from these ports of 127.0.0.1; existing connections stay.

    Raises OSError if the system has no such filter.
    """
    assert len(ports) <= _MOST_ADMITTED, f"{len(ports)} ports, but a filter holds {_MOST_ADMITTED}"
    (loopback,) = struct.unpack("!I", socket.inet_aton(LOOPBACK))
    program = [
        (_LOAD_WORD, 0, 0, _SOURCE_ADDRESS),
        (_JUMP_EQUAL, 0, len(ports) + 1, loopback),
        (_LOAD_HALF, 0, 0, _SOURCE_PORT),
        *((_JUMP_EQUAL, len(ports) - number, 0, port) for number, port in enumerate(ports)),
        (_RETURN, 0, 0, 0),
        (_RETURN, 0, 0, 0xFFFFFFFF),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))


def listening_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's listening TCP sockets."""
    for found in _own_sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield found


def own_listener(port: int) -> socket.socket:
    """Return the listening socket of this process on a port of 127.0.0.1, duplicated."""
    for found in listening_sockets():
        if _plain(found.getsockname()) == (LOOPBACK, port):
            return found.dup()
    raise AssertionError(f"no socket of this process listens on {LOOPBACK}:{port}")


@contextlib.contextmanager
def closing_new_listeners() -> Iterator[None]:
    """Close ports opened inside the block, once all their connections are made.

    A gloo group listens as long as it lives, but all its connections are made with it.
    """
    before = {found.getsockname() for found in listening_sockets()}
    yield
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0":
        return
    for found in listening_sockets():
        if found.getsockname() not in before:
            with contextlib.suppress(OSError):
                admit_only(found, ())


def is_own(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Return True if the client's end of a connection within this host belongs to this process."""
    return any(_ends(found) == (client, server) for found in _own_sockets())


def end_connections_to(port: int) -> None:
    """End other processes' connections to a port of this one."""
    for found in _own_sockets():
        own, other = _ends(found)
        if own is not None and other is not None and own[1] == port and not is_own(other, own):
            found.shutdown(socket.SHUT_RDWR)


def _ends(found: socket.socket) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Return both ends of a socket; None for a missing end."""
    with contextlib.suppress(OSError):
        own = _plain(found.getsockname())
        with contextlib.suppress(OSError):
            return own, _plain(found.getpeername())
        return own, None
    return None, None


def _plain(name: tuple[Any, ...]) -> tuple[str, int]:
    """Return host and port, with IPv4-mapped addresses as IPv4."""
    return name[0].removeprefix("::ffff:"), name[1]


def _own_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets, each closed when the next one is taken."""
    linux = Path("/proc/self/fd")
    for name in os.listdir(linux if linux.exists() else "/dev/fd"):
        with contextlib.suppress(OSError):
            duplicate = os.dup(int(name))
            try:
                found = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                continue
            with found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found
