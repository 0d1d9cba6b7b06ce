"""Listening sockets on loopback that let in this rank's gate, and no other process."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from spmdrl.resources.network.sockets import LOOPBACK, MOST_ADMITTED, admit_only, end_connections_to, own_listener


class Door:
    """A listening socket of this process, on loopback, that admits connections of its gate only."""

    def __init__(self, port: int, *, is_closed: bool = True):
        """Raises OSError where the system can't keep others out, which an open door (`is_closed=False`) doesn't try."""
        self.port = port
        self._is_closed = is_closed
        self._listener = own_listener(port)
        self._admitted: deque[int] = deque(maxlen=MOST_ADMITTED)
        if is_closed:
            admit_only(self._listener, ())
            # Those that came before the filter.
            end_connections_to(port)
            self._check_is_closed()

    def admit(self) -> socket.socket:
        """A socket that may connect to the door; `forget` it at its end."""
        own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        own.bind((LOOPBACK, 0))
        self._admitted.append(own.getsockname()[1])
        self._apply()
        # A small write must not wait for the answer to the one before it.
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.setblocking(False)
        return own

    def forget(self, port: int) -> None:
        """Close the door to a port of this host that others may have next."""
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
