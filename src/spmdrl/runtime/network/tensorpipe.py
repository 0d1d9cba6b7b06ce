"""The one message of TensorPipe that must change where a gate is in between."""

from __future__ import annotations

import struct

from spmdrl.runtime.network.sockets import LOOPBACK

# Lengths are of the processor's own order.
_FRAME = struct.Struct("=Q")
_LONGEST_ANSWER_BYTES = 4096


class AgentRenamed:
    """Puts the way to an agent in the place of its own address, to which TensorPipe makes its further connections.

    TensorPipe sends frames with 8 bytes of length in front. The first one on an agent's first connection holds the
    address where the agent listens; all others pass unchanged.
    """

    def __init__(self, agent_port: int, own_port: int):
        self._before, self._after = (_tensorpipe_address(port) for port in (agent_port, own_port))
        assert len(self._before) == len(self._after), f"{agent_port} and {own_port} must have equally many digits"
        self._held = b""
        self._is_done = False

    def __call__(self, data: bytes) -> bytes:
        """What may be passed on after `data` has come."""
        if self._is_done:
            return data
        self._held += data
        if len(self._held) < _FRAME.size:
            return b""
        end = _FRAME.size + _FRAME.unpack_from(self._held)[0]
        if end <= _LONGEST_ANSWER_BYTES:
            if len(self._held) < end:
                return b""
            first = self._held[:end].replace(self._before, self._after, 1)
            self._held = first + self._held[end:]
        self._is_done = True
        held, self._held = self._held, b""
        return held


def _tensorpipe_address(port: int) -> bytes:
    """The transport and the address as TensorPipe writes them: each string after a mark and its length."""
    address = f"{LOOPBACK}:{port}".encode()
    return b"\xbd\x02uv\xbd" + bytes([len(address)]) + address
