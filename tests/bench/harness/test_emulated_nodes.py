"""Network namespaces as nodes: they reach each other over shaped links only, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.bench.harness.emulated_nodes import MAX_NODES, emulated_nodes, refusal

_reason = refusal()
needs_namespaces = pytest.mark.skipif(_reason is not None, reason=str(_reason))

LINK_BYTES_PER_SECOND = 40e6
SENT_BYTES = 16_000_000

_RECEIVE = f"""
import json, socket, sys, time
from tests.bench.harness.emulated_nodes import Node, link_bytes
Node(sys.argv[1], "").enter()
server = socket.create_server(("0.0.0.0", 4000))
print("ready", flush=True)
peer, _ = server.accept()
started, missing = time.perf_counter(), {SENT_BYTES}
while missing:
    missing -= len(peer.recv(1 << 20))
seconds = time.perf_counter() - started
print(json.dumps([seconds, link_bytes("link0").received]))
"""
_SEND = f"""
import socket, sys
from tests.bench.harness.emulated_nodes import Node
Node(sys.argv[1], "").enter()
socket.create_connection((sys.argv[2], 4000)).sendall(bytes({SENT_BYTES}))
"""
_HOLD = """
import signal, time
from tests.bench.harness.emulated_nodes import emulated_nodes
# A shell's background jobs and what they start ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
with emulated_nodes(2, 1e8):
    print("made", flush=True)
    time.sleep(60)
"""


def _namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"spmdrl-{pid}-")]


@contextmanager
def _holder() -> Iterator[subprocess.Popen[str]]:
    """A process of its own that has made nodes."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "made\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@needs_namespaces
def test_bytes_between_nodes_take_as_long_as_their_link_says_and_are_counted():
    with emulated_nodes(2, LINK_BYTES_PER_SECOND) as (first, second):
        receive = [sys.executable, "-c", _RECEIVE, second.name]
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
            subprocess.run([sys.executable, "-c", _SEND, first.name, second.address], check=True, timeout=30)
            seconds, received = json.loads(receiver.stdout.readline())
    # Bursts and buffers are about a megabyte ahead of the rate.
    assert seconds > 0.8 * SENT_BYTES / LINK_BYTES_PER_SECOND
    assert SENT_BYTES < received < 1.1 * SENT_BYTES


@needs_namespaces
def test_a_node_that_is_cut_off_gets_nothing_until_its_link_is_back():
    with emulated_nodes(2, LINK_BYTES_PER_SECOND) as (first, second):

        def gets_through() -> bool:
            # As a datagram would be lost in silence, a connection.
            probe = f"""
import socket, sys
from tests.bench.harness.emulated_nodes import Node
Node({first.name!r}, "").enter()
probe = socket.socket()
probe.settimeout(0.7)
try:
    probe.connect(({second.address!r}, 4000))
except ConnectionRefusedError:
    print("there")
except OSError:
    print("silent")
"""
            done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=30)
            return done.stdout == "there\n"

        assert gets_through()
        with second.cut_off():
            assert not gets_through()
        assert gets_through()


@needs_namespaces
@pytest.mark.alone
def test_nodes_leave_the_host_as_it_was_while_they_are_there():
    before = os.listdir("/sys/class/net")
    with emulated_nodes(2, 1e8):
        assert os.listdir("/sys/class/net") == before
        assert len(_namespaces(os.getpid())) == 3  # with the switch's
    assert not _namespaces(os.getpid())


@needs_namespaces
def test_nodes_are_gone_after_an_exception():
    with pytest.raises(ZeroDivisionError), emulated_nodes(1, 1e8):
        _ = 1 // 0
    assert not _namespaces(os.getpid())


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nodes_are_gone_after_a_signal(number: signal.Signals):
    with _holder() as process:
        assert len(_namespaces(process.pid)) == 3
        process.send_signal(number)
        process.communicate(timeout=10)
        assert process.returncode != 0
        assert not _namespaces(process.pid)


@needs_namespaces
@pytest.mark.alone
def test_what_a_killed_process_left_is_removed_at_the_next_start_and_what_others_use_is_not():
    with _holder() as alive:
        with _holder() as killed:
            killed.kill()
            killed.wait()
            assert len(_namespaces(killed.pid)) == 3
            with emulated_nodes(1, 1e8):
                assert not _namespaces(killed.pid)
                assert len(_namespaces(alive.pid)) == 3
        alive.terminate()
        alive.communicate(timeout=10)


def test_a_refusal_names_the_tools_that_are_missing(monkeypatch: pytest.MonkeyPatch):
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("refused for another reason")
    monkeypatch.setenv("PATH", "")
    assert "ip and tc of iproute2" in str(refusal())


def test_more_nodes_than_addresses_are_refused():
    with pytest.raises(ValueError, match=f"1 to {MAX_NODES}"), emulated_nodes(MAX_NODES + 1, 1e8):
        pass
