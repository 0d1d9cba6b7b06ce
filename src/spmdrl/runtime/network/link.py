"""Links between gates: both ends prove that they hold the job's secret, then exchange records with MACs.

Challenge and response with fresh numbers and keyed BLAKE2b (RFC 7693) from Python's standard library; TLS with a shared
key would need Python 3.13. Each record's MAC covers its place in the stream too, under a key of this link and
direction, so that nothing can be replayed, dropped or changed on the way. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

_MAGIC = b"spmdrl 1"
_HELLO = struct.Struct(">8s32s8sIIB")
_ANSWER = struct.Struct(">8s32s32s")
_RECORD = struct.Struct(">I")
_HASH_BYTES = 32
_MAC_BYTES = 16
MOST_RECORD_BYTES = 1 << 18
_WELCOME = b""


class NoSecret(ValueError):
    """The other end doesn't hold this job's secret."""


class TurnedAway(ConnectionError):
    """The other end isn't a gate, or one that doesn't take part in this attempt of the job."""


@dataclass(frozen=True)
class Hello:
    """First message of a dialling gate."""

    incarnation: bytes
    """8 bytes that distinguish a rank's processes"""
    from_rank: int
    to_rank: int
    service: int
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def packed(self) -> bytes:
        return _HELLO.pack(_MAGIC, self.challenge, self.incarnation, self.from_rank, self.to_rank, self.service)

    @classmethod
    def of(cls, packed: bytes) -> Hello:
        """Parse a greeting; raises NoSecret for anything else."""
        magic, challenge, incarnation, from_rank, to_rank, service = _HELLO.unpack(packed)
        if magic != _MAGIC:
            raise NoSecret
        return cls(incarnation, from_rank, to_rank, service, challenge)


class Seal:
    """MACs of one direction of a link: each covers its record and the number of earlier ones."""

    def __init__(self, key: bytes):
        self._key = key
        self._count = 0

    def next(self, payload: bytes) -> bytes:
        mac = hashlib.blake2b(self._count.to_bytes(8, "big"), key=self._key, digest_size=_MAC_BYTES)
        mac.update(payload)
        self._count += 1
        return mac.digest()


@dataclass
class Link:
    """Records to and from another gate."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sent: Seal
    received: Seal
    alter: Callable[[bytes], bytes] = bytes
    """transformation of received bytes before they are forwarded"""

    def send(self, payload: bytes) -> None:
        self.writer.write(_RECORD.pack(len(payload)) + self.sent.next(payload))
        self.writer.write(payload)

    async def receive(self) -> bytes:
        """Return the next record; raises NoSecret if its MAC is wrong, EOFError at the end."""
        head = await self.reader.readexactly(_RECORD.size + _MAC_BYTES)
        (length,) = _RECORD.unpack_from(head)
        if length > MOST_RECORD_BYTES:
            raise NoSecret
        payload = await self.reader.readexactly(length)
        if not hmac.compare_digest(head[_RECORD.size :], self.received.next(payload)):
            raise NoSecret
        return payload

    async def refuse(self, reason: str) -> None:
        """Refuse the dialler, for which it raises TurnedAway."""
        self.send(reason.encode())
        await self.writer.drain()

    def welcome(self) -> None:
        """Accept the dialler."""
        self.send(_WELCOME)


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, rank: int
) -> tuple[Link, Hello]:
    """Return the link with a proven dialler that wants this rank; it waits for a welcome or refusal.

    Raises NoSecret or EOFError for all others.
    """
    packed = await reader.readexactly(_HELLO.size)
    hello = Hello.of(packed)
    if hello.to_rank != rank:
        raise NoSecret
    challenge = secrets.token_bytes(32)
    transcript = packed + challenge
    writer.write(_ANSWER.pack(_MAGIC, challenge, _keyed(secret, "acceptor proves", transcript)))
    proof = await reader.readexactly(_HASH_BYTES)
    if not hmac.compare_digest(proof, _keyed(secret, "dialer proves", transcript)):
        raise NoSecret
    sends, receives = (_keyed(secret, purpose, transcript) for purpose in ("acceptor sends", "dialer sends"))
    return Link(reader, writer, Seal(sends), Seal(receives)), hello


async def dial(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, hello: Hello) -> Link:
    """Return the link with a gate that has proved itself and welcomes this one.

    Raises NoSecret for a gate of another secret, TurnedAway for anything but a gate of that rank, or a refusal.
    """
    packed = hello.packed()
    writer.write(packed)
    try:
        magic, challenge, proof = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
    except asyncio.IncompleteReadError as error:
        raise TurnedAway(f"rank {hello.to_rank} doesn't listen there") from error
    if magic != _MAGIC:
        raise TurnedAway("something else listens there")
    transcript = packed + challenge
    if not hmac.compare_digest(proof, _keyed(secret, "acceptor proves", transcript)):
        raise NoSecret
    writer.write(_keyed(secret, "dialer proves", transcript))
    sends, receives = (_keyed(secret, purpose, transcript) for purpose in ("dialer sends", "acceptor sends"))
    link = Link(reader, writer, Seal(sends), Seal(receives))
    if (refusal := await link.receive()) != _WELCOME:
        raise TurnedAway(refusal.decode())
    return link


def _keyed(secret: bytes, purpose: str, transcript: bytes) -> bytes:
    return hashlib.blake2b(transcript, key=secret, digest_size=_HASH_BYTES, person=purpose.encode()).digest()
