from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from spmdrl.runtime.network.gate import RPC, STORE, Address, Gate, Target
from spmdrl.runtime.network.link import Hello, NoSecret, Seal, TurnedAway
from spmdrl.runtime.network.sockets import LOOPBACK, Door

SECRET = bytes(range(32))
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="packet filters on sockets are Linux's")
STRANGER = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "


class Echo:
    """A service that sends back what it gets after a greeting, and records all of it."""

    def __init__(self, greeting: bytes = b"") -> None:
        self._greeting = greeting
        self.received = b""
        self.num_connections = 0
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(self._greeting)
            while data := connection.recv(1 << 16):
                self.received += data
                connection.sendall(data)

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def gates(echo: Echo | None = None) -> Iterator[tuple[Echo, Gate, Gate, Target]]:
    """A service behind rank 0's gate, rank 1's gate, and what rank 1 wants to reach."""
    echo, host, guest = echo or Echo(), Gate(SECRET, 0), Gate(SECRET, 1)
    host.lead_to(STORE, Door(echo.port, is_closed=sys.platform == "linux"))
    try:
        yield echo, host, guest, Target(host.listen(LOOPBACK), 0, STORE)
    finally:
        guest.close()
        host.close()
        echo.close()


def echoed(port: int, data: bytes) -> bytes:
    with socket.create_connection((LOOPBACK, port), timeout=10) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        came = b""
        while len(came) < len(data) and (part := connection.recv(1 << 16)):
            came += part
        sender.join()
        return came


def test_what_crosses_two_gates_arrives_unchanged():
    with gates() as (_, _, guest, target):
        for size in (1, 100, 70_000, 3_000_000):
            data = random.Random(size).randbytes(size)
            assert echoed(guest.way_to(target), data) == data


@LINUX
def test_nobody_connects_to_a_door_but_its_gate():
    with gates() as (echo, _, guest, target):
        for source in (LOOPBACK, "127.0.0.9"):
            with socket.socket() as stranger:
                stranger.bind((source, 0))
                stranger.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    stranger.connect((LOOPBACK, echo.port))
        assert echo.num_connections == 0
        assert echoed(guest.way_to(target), b"ours") == b"ours"


@LINUX
def test_whoever_came_before_the_door_was_closed_is_put_out():
    echo = Echo()
    script = STRANGER + "print(1, flush=True); s.recv(1)"
    stranger = subprocess.Popen([sys.executable, "-c", script, str(echo.port)], stdout=subprocess.PIPE)
    try:
        assert stranger.stdout is not None and stranger.stdout.readline() == b"1\n"
        with socket.create_connection((LOOPBACK, echo.port)) as own:
            door = Door(echo.port)
            assert stranger.wait(10) == 0, "its connection has ended"
            own.sendall(b"ours")
            assert own.recv(4) == b"ours"
            door.close()
    finally:
        stranger.kill()
        stranger.communicate()
        echo.close()


def test_only_this_process_can_use_its_way_to_another_rank():
    script = STRANGER + "s.sendall(b'x'); print(len(s.recv(9)))"
    with gates() as (echo, _, guest, target):
        port = str(guest.way_to(target))
        done = subprocess.run([sys.executable, "-c", script, port], capture_output=True, text=True, check=False)
        assert done.stdout == "0\n" or "ConnectionResetError" in done.stderr
        assert echo.received == b""


def test_another_secret_is_found_out_by_both_sides():
    with gates() as (echo, _, _, target):
        stranger = Gate(bytes(32), 1)
        try:
            with pytest.raises(NoSecret):
                stranger.check(target)
        finally:
            stranger.close()
        assert echo.num_connections == 0


def test_a_second_process_of_a_rank_and_a_wrong_rank_are_turned_away():
    with gates() as (_, _, guest, target):
        guest.check(target)
        late = Gate(SECRET, 1)
        try:
            with pytest.raises(TurnedAway, match="another process has already joined as rank 1"):
                late.check(target)
            with pytest.raises(TurnedAway, match="rank 3 doesn't listen there"):
                guest.check(Target(target.address, 3, STORE))
            with pytest.raises(TurnedAway, match="isn't open"):
                guest.check(Target(target.address, 0, RPC))
        finally:
            late.close()


def test_what_is_no_gate_is_not_believed():
    echo = Echo(b"HTTP/1.1 400 Bad Request\r\n" * 3)
    guest = Gate(SECRET, 1)
    try:
        with pytest.raises(TurnedAway, match="something else listens there"):
            guest.check(Target(Address(LOOPBACK, echo.port), 0, STORE))
        with pytest.raises(OSError):
            guest.check(Target(Address(LOOPBACK, 1), 0, STORE))
    finally:
        guest.close()
        echo.close()


HELLO = Hello(bytes(8), 1, 0, STORE).packed()
PAYLOADS = {
    "nothing": b"",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TensorPipe frame of 2^62 bytes": (1 << 62).to_bytes(8, "little") * 8,
    "a store's requests": bytes([0, 9, 1]) * 100,
    "a hello without a proof": HELLO,
    "a hello with a false proof": HELLO + bytes(32),
    "half a hello": HELLO[:20],
    "a pickle": b"cos\nsystem\n(S'touch /tmp/never'\ntR." * 10,
}


def send_as_stranger(address: Address, payload: bytes) -> bytes:
    with socket.create_connection((address.host, address.port), timeout=2) as stranger, contextlib.suppress(OSError):
        stranger.sendall(payload)
        stranger.shutdown(socket.SHUT_WR)
        came = b""
        while part := stranger.recv(4096):
            came += part
        return came
    return b""


def test_no_byte_of_a_stranger_reaches_the_service():
    num_random = int(os.environ.get("SPMDRL_FUZZ", "30"))
    draw = random.Random(0)
    garbage = [draw.randbytes(draw.randrange(1, 5000)) for _ in range(num_random)]
    with gates() as (echo, _, guest, target):
        for payload in (*PAYLOADS.values(), *garbage):
            answer = send_as_stranger(target.address, payload)
            assert len(answer) in (0, 72), "at most the gate's own challenge and proof"
        assert echo.num_connections == 0
        assert echoed(guest.way_to(target), b"still here") == b"still here"


@contextlib.contextmanager
def tapped(target: Target) -> Iterator[tuple[Target, list[bytes], list]]:
    """A wire tap before a gate: all that went there, and what to do with each chunk."""
    listener = socket.create_server((LOOPBACK, 0))
    captured: list[bytes] = []
    changes: list = []

    def pipe(source: socket.socket, sink: socket.socket, *, captures: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if captures:
                    for change in changes:
                        data = change(data)
                    captured.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((target.address.host, target.address.port))
                threading.Thread(target=pipe, args=(client, server), kwargs={"captures": True}, daemon=True).start()
                threading.Thread(target=pipe, args=(server, client), kwargs={"captures": False}, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield Target(Address(LOOPBACK, listener.getsockname()[1]), target.rank, target.service), captured, changes
    finally:
        listener.close()


def test_a_captured_conversation_cannot_be_replayed():
    with gates() as (echo, _, guest, target), tapped(target) as (tap, captured, _):
        assert echoed(guest.way_to(tap), b"rewards of row 7") == b"rewards of row 7"
        before = echo.num_connections
        for payload in (b"".join(captured), *itertools.accumulate(captured)):
            send_as_stranger(target.address, payload)
        assert echo.num_connections == before and echo.received == b"rewards of row 7"


def test_a_changed_or_repeated_record_ends_the_connection():
    flips = (lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data * 2)
    for flip in flips:
        with gates() as (echo, _, guest, target), tapped(target) as (tap, _, changes):
            port = guest.way_to(tap)
            with socket.create_connection((LOOPBACK, port), timeout=5) as connection:
                connection.sendall(b"first")
                assert connection.recv(5) == b"first"
                changes.append(flip)
                with contextlib.suppress(OSError):
                    connection.sendall(b"second")
                    while connection.recv(100):
                        pass
            assert echo.received in (b"first", b"firstsecond"), "a repeated record is passed on once at most"


def test_each_record_has_a_mac_of_its_own():
    sender, receiver = Seal(bytes(32)), Seal(bytes(32))
    macs = [sender.next(b"same") for _ in range(4)]
    assert len(set(macs)) == 4 and macs == [receiver.next(b"same") for _ in range(4)]


def test_slow_strangers_do_not_keep_ranks_out():
    with gates() as (_, _, guest, target), contextlib.ExitStack() as stack:
        for _ in range(400):
            stranger = socket.create_connection((target.address.host, target.address.port))
            stack.enter_context(stranger)
            stranger.sendall(HELLO[:7])
        started = time.monotonic()
        assert echoed(guest.way_to(target), b"in time") == b"in time"
        assert time.monotonic() - started < 5


class Tally(Echo):
    """Answers each 13 bytes, and none before they are all there."""

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while came := connection.recv(13, socket.MSG_WAITALL):
                connection.sendall(came)


def test_small_writes_do_not_wait_for_each_other():
    with gates(Tally()) as (_, _, guest, target), socket.create_connection((LOOPBACK, guest.way_to(target))) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = []
        for _ in range(15):
            started = time.perf_counter()
            own.sendall(b"length")
            time.sleep(0.002)
            own.sendall(b"content")
            assert len(own.recv(13, socket.MSG_WAITALL)) == 13
            seconds.append(time.perf_counter() - started)
        # A write that waits for an acknowledgement takes 40 ms.
        assert sorted(seconds)[3] < 0.03
