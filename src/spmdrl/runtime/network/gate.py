"""The gate: connections between ranks that only holders of the job's secret can make.

PyTorch's store and RPC agents accept any connection, and an agent trusts every byte. So both listen on loopback, closed
to all but their own rank's gate (sockets.py). Gates connect them, after proofs of the secret and with MACs on the
forwarded bytes (link.py):

    program -> own gate -> other rank's gate -> door of the service
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from spmdrl.runtime.network.link import MOST_RECORD_BYTES, Hello, Link, NoSecret, TurnedAway, accept, dial
from spmdrl.runtime.network.sockets import LOOPBACK, Door, is_own

STORE, RPC = 0, 1
"""services behind a gate"""

# The time that a connection has to prove itself, and how many may be unproven; beyond that the oldest is ended.
_PROOF_SECONDS = 10.0
_MOST_UNPROVEN = 256
# Header of a TensorPipe frame, in native byte order.
_LENGTH = struct.Struct("=Q")
_LONGEST_ANSWER_BYTES = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """Address that a rank's gate listens on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Target:
    """A service of another rank."""

    address: Address
    rank: int
    service: int


class Gate:
    """This rank's gate. It works in a thread of its own until it is closed."""

    def __init__(self, secret: bytes, rank: int):
        self._secret = secret
        self._rank = rank
        self._incarnation = secrets.token_bytes(8)
        self._admitted: dict[int, bytes] = {}
        """ranks that have connected, each with the bytes that distinguish its processes"""
        self._doors: dict[int, Door] = {}
        self._ways: dict[tuple[Target, int | None], asyncio.Server] = {}
        self._unproven: deque[asyncio.StreamWriter] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._address: Address | None = None
        self._num_inside = 0
        self.is_open = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gate", daemon=True)
        self._thread.start()

    def listen(self, host: str, port: int = 0) -> Address:
        """Admit holders of the secret at an address of this host, from the first call on.

        Raises OSError if the address isn't available.
        """
        if self._address is None:
            limit = MOST_RECORD_BYTES
            self._server = server = self._run(asyncio.start_server(self._on_connection, host, port, limit=limit))
            self._address = Address(host, _port_of(server))
        return self._address

    def lead_to(self, service: int, door: Door) -> None:
        """Connect admitted ranks to the service behind a door from here on."""
        self.forget(service)
        self._doors[service] = door

    def forget(self, service: int) -> None:
        """Stop connecting to a service, here and at other ranks; existing connections stay."""
        if (door := self._doors.pop(service, None)) is not None:
            door.close()
        for key in [key for key in self._ways if key[0].service == service]:
            self._loop.call_soon_threadsafe(self._ways.pop(key).close)

    def way_to(self, target: Target, disguised_port: int | None = None) -> int:
        """Return a port of 127.0.0.1 from which only this process reaches the target.

        `disguised_port`: the port that the service itself listens on, and names in its first message.
        """
        key = target, disguised_port
        if key not in self._ways:
            serve = lambda reader, writer: self._on_own(reader, writer, target, disguised_port)  # noqa: E731
            self._ways[key] = self._run(_server_beside(serve, disguised_port))
        return _port_of(self._ways[key])

    def check(self, target: Target) -> None:
        """Connect to a target once. Raises NoSecret, TurnedAway or another OSError."""

        async def knock() -> None:
            link = await self._dialled(target)
            link.writer.close()

        try:
            self._run(asyncio.wait_for(knock(), _PROOF_SECONDS))
        except (asyncio.TimeoutError, EOFError) as error:
            raise TurnedAway(f"{target.address} doesn't answer") from error

    def has_admitted(self, num_ranks: int) -> bool:
        return len(self._admitted) >= num_ranks

    def close(self, *, wait_seconds: float = 0.0) -> None:
        """End all connections, other ranks' after they have ended them or `wait_seconds`."""
        if not self.is_open:
            return
        self.is_open = False
        deadline = time.monotonic() + wait_seconds
        while self._num_inside and time.monotonic() < deadline:
            time.sleep(0.01)
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for server in (self._server, *self._ways.values()):
            if server is not None:
                server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for door in self._doors.values():
            door.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # A connection from outside.

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._kept_until_done(writer):
            self._unproven.append(writer)
            if len(self._unproven) > _MOST_UNPROVEN:
                self._unproven.popleft().transport.abort()
            try:
                link, hello = await asyncio.wait_for(accept(reader, writer, self._secret, self._rank), _PROOF_SECONDS)
            finally:
                with contextlib.suppress(ValueError):
                    self._unproven.remove(writer)
            await self._pass_through_door(link, hello)

    async def _pass_through_door(self, link: Link, hello: Hello) -> None:
        came_before = self._admitted.setdefault(hello.from_rank, hello.incarnation)
        if came_before != hello.incarnation:
            await link.refuse(f"another process has already joined as rank {hello.from_rank}")
            return
        door = self._doors.get(hello.service)
        if door is None:
            await link.refuse("its service isn't open")
            return
        link.welcome()
        own = door.admit()
        port = own.getsockname()[1]
        self._num_inside += 1
        try:
            await self._loop.sock_connect(own, (LOOPBACK, door.port))
            reader, writer = await asyncio.open_connection(sock=own, limit=MOST_RECORD_BYTES)
            await _pass_on(link, reader, writer)
        finally:
            self._num_inside -= 1
            door.forget(port)
            own.close()

    # A connection of this process, to the outside.

    async def _on_own(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target, disguised_port: int | None
    ) -> None:
        with self._kept_until_done(writer):
            if not is_own(writer.get_extra_info("peername"), writer.get_extra_info("sockname")):
                raise NoSecret
            link = await asyncio.wait_for(self._dialled(target), _PROOF_SECONDS)
            if disguised_port is not None:
                link.alter = AgentRenamed(disguised_port, writer.get_extra_info("sockname")[1])
            await _pass_on(link, reader, writer)

    async def _dialled(self, target: Target) -> Link:
        """Return a link with the target's gate, which has proved that it holds the secret and leads there."""
        reader, writer = await asyncio.open_connection(
            target.address.host, target.address.port, limit=MOST_RECORD_BYTES
        )
        try:
            hello = Hello(self._incarnation, self._rank, target.rank, target.service)
            return await dial(reader, writer, self._secret, hello)
        except BaseException:
            writer.transport.abort()
            raise

    @contextlib.contextmanager
    def _kept_until_done(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Confine errors of a connection to that connection, and close it afterwards."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(NoSecret, OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
                yield
        finally:
            self._tasks.discard(task)
            writer.close()


async def _pass_on(link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes between a link and a local connection until either ends."""

    async def outwards() -> None:
        while data := await reader.read(MOST_RECORD_BYTES):
            link.send(data)
            await link.writer.drain()

    async def inwards() -> None:
        while True:
            writer.write(link.alter(await link.receive()))
            await writer.drain()

    ways = [asyncio.ensure_future(outwards()), asyncio.ensure_future(inwards())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        link.writer.close()


async def _server_beside(serve: Callable[..., Any], disguised_port: int | None) -> asyncio.Server:
    """Return a server on a free port of loopback with as many digits as the other port."""
    for _ in range(100):
        server = await asyncio.start_server(serve, LOOPBACK, 0, limit=MOST_RECORD_BYTES)
        if disguised_port is None or len(str(_port_of(server))) == len(str(disguised_port)):
            return server
        server.close()
    raise OSError(f"no free port of {LOOPBACK} has as many digits as {disguised_port}")


def _port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


class AgentRenamed:
    """Replacement of an agent's own address by the way to it, for TensorPipe's further connections.

    TensorPipe prefixes frames with 8 bytes of length. The first one on an agent's first connection holds the address
    that the agent listens on; all others pass unchanged.
    """

    def __init__(self, agent_port: int, own_port: int):
        self._before, self._after = (_tensorpipe_address(port) for port in (agent_port, own_port))
        assert len(self._before) == len(self._after), f"{agent_port} and {own_port} must have equally many digits"
        self._held = b""
        self._is_done = False

    def __call__(self, data: bytes) -> bytes:
        """Return the bytes that may be forwarded after `data` was received."""
        if self._is_done:
            return data
        self._held += data
        if len(self._held) < _LENGTH.size:
            return b""
        end = _LENGTH.size + _LENGTH.unpack_from(self._held)[0]
        if end <= _LONGEST_ANSWER_BYTES:
            if len(self._held) < end:
                return b""
            first = self._held[:end].replace(self._before, self._after, 1)
            self._held = first + self._held[end:]
        self._is_done = True
        held, self._held = self._held, b""
        return held


def _tensorpipe_address(port: int) -> bytes:
    """Return the transport and the address as TensorPipe writes them: each string after a mark and its length."""
    address = f"{LOOPBACK}:{port}".encode()
    return b"\xbd\x02uv\xbd" + bytes([len(address)]) + address
