"""TCP and pickle between a producer and a consumer, for the samples bench, through a server that opens no blob."""

from __future__ import annotations

import contextlib
import hmac
import multiprocessing
import pickle
import secrets
import socket
import socketserver
import struct
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np

from tests.bench.samples.sample_driver import Columns, main

Address = tuple[int, bytes]
HOST = "127.0.0.1"
PUT, GET, COUNT, CLEAR = range(4)
REQUEST, SIZE = struct.Struct("!BQ"), struct.Struct("!Q")
TOKEN_BYTES = 32
# Smaller pieces than this are joined: a system call costs more than their copy.
SMALL_BYTES = 1 << 16


class TcpPickle:
    """Pickle protocol 5 with the arrays' bytes beside it, first in first out, in a server process."""

    packed = False

    def __init__(self, address: Address):
        port, token = address
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(token)

    @staticmethod
    @contextlib.contextmanager
    def serve() -> Iterator[Address]:
        """Run the server."""
        spawn, token = multiprocessing.get_context("spawn"), secrets.token_bytes(TOKEN_BYTES)
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=_serve, args=(theirs, token), daemon=True)
        server.start()
        try:
            yield ours.recv(), token
        finally:
            server.kill()
            server.join()

    def put(self, rows: Sequence[int], columns: Columns) -> None:
        buffers: list[memoryview] = []
        head = pickle.dumps(columns, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
        sizes = struct.pack(f"!QQ{len(buffers)}Q", len(head), len(buffers), *(part.nbytes for part in buffers))
        self._send(PUT, [sizes, head, *buffers])
        _receive(self._socket, 1)

    def get(self, num_rows: int, names: Sequence[str]) -> Columns:
        self._send(GET)
        blob = memoryview(_receive(self._socket, self._received_size()))
        head_size, count = struct.unpack_from("!QQ", blob)
        sizes = struct.unpack_from(f"!{count}Q", blob, 16)
        ends = np.cumsum([16 + 8 * count, head_size, *sizes]).tolist()
        head, *buffers = [blob[start:stop] for start, stop in zip(ends[:-1], ends[1:], strict=True)]
        return pickle.loads(head, buffers=buffers)

    def num_ready(self) -> int:
        self._send(COUNT)
        return self._received_size()

    def clear(self) -> None:
        self._send(CLEAR)
        _receive(self._socket, 1)

    def _received_size(self) -> int:
        return SIZE.unpack(_receive(self._socket, SIZE.size))[0]

    def _send(self, request: int, parts: Sequence[bytes | memoryview] = ()) -> None:
        joined = bytearray(REQUEST.pack(request, sum(len(part) for part in parts)))
        for part in parts:
            if len(part) < SMALL_BYTES:
                joined += part
            else:
                self._socket.sendall(joined)
                self._socket.sendall(part)
                joined = bytearray()
        self._socket.sendall(joined)


class PackedTcpPickle(TcpPickle):
    """The same with one array per column, however long its rows: what pickle is best at."""

    packed = True


def _receive(source: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = source.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return data


class _BlobServer(socketserver.ThreadingTCPServer):
    """Keeps blobs for one consumer."""

    def __init__(self, token: bytes):
        super().__init__((HOST, 0), _BlobConnection)
        self.token = token
        self.blobs: list[bytearray] = []
        self.num_taken = 0


class _BlobConnection(socketserver.BaseRequestHandler):
    request: socket.socket
    server: _BlobServer

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What the consumer unpickles must come from this bench's producer alone.
        if hmac.compare_digest(_receive(self.request, TOKEN_BYTES), self.server.token):
            with contextlib.suppress(EOFError):
                while True:
                    self._answer(*REQUEST.unpack(_receive(self.request, REQUEST.size)))

    def _answer(self, kind: int, size: int) -> None:
        kept = self.server
        if kind == PUT:
            kept.blobs.append(_receive(self.request, size))
            self.request.sendall(b"1")
        elif kind == GET:
            blob = kept.blobs[kept.num_taken]
            # Counted before the consumer has it: the other connection may then clear all, in a thread of its own.
            kept.num_taken += 1
            self.request.sendall(SIZE.pack(len(blob)))
            self.request.sendall(blob)
        elif kind == COUNT:
            self.request.sendall(SIZE.pack(len(kept.blobs) - kept.num_taken))
        else:
            kept.blobs.clear()
            kept.num_taken = 0
            self.request.sendall(b"1")


def _serve(pipe: Connection, token: bytes) -> None:
    server = _BlobServer(token)
    pipe.send(server.server_address[1])
    server.serve_forever()


if __name__ == "__main__":
    main({"tcp_pickle": TcpPickle, "tcp_pickle_packed": PackedTcpPickle})
