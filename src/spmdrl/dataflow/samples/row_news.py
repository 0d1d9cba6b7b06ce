"""Encoding of row news between ranks.

A message is a zlib stream: a line of JSON that lists the entries, then their arrays as int64, row numbers as
differences between neighbours. Most of these bytes are zeros; a row takes one to three compressed bytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from spmdrl.dataflow.samples.catalogue import News, RowDrop, RowMetadata, announced_lengths, joined
from spmdrl.dataflow.samples.schema import RULES
from spmdrl.nouns.batch import Integers
from spmdrl.resources.collectives import gather_and_agree


@dataclass(frozen=True)
class Exchanged:
    """News that all ranks published."""

    news: list[News]
    received_bytes: int
    """bytes from other ranks"""
    stop_reason: str | None
    """reason for which a rank was asked to stop"""


def exchanged(news: Iterable[News]) -> Exchanged:
    """Return all ranks' news. Collective over all ranks."""
    packed = pack_news(joined(news))
    gathered, stop_reason = gather_and_agree(packed)
    received_bytes = sum(map(len, gathered)) - len(packed)
    return Exchanged(joined(entry for part in gathered for entry in unpack_news(part)), received_bytes, stop_reason)


def pack_news(news: Iterable[News]) -> bytes:
    """Encode news as one message; `joined` news take the least room."""
    heads: list[list[object]] = []
    arrays: list[Integers] = []
    for entry in news:
        arrays.append(np.diff(entry.rows, prepend=0))
        if isinstance(entry, RowMetadata):
            heads.append([entry.columns, entry.rows.size, len(entry.places)])
            arrays += [entry.lengths[name] for name in announced_lengths(entry.columns)]
            arrays.append(entry.places)
        else:
            heads.append([entry.reason, entry.rows.size])
    content = [array.astype("<i8").tobytes() for array in arrays]
    return zlib.compress(b"".join([json.dumps(heads).encode(), b"\n", *content]), level=1)


def unpack_news(message: bytes) -> list[News]:
    """Decode a message of `pack_news`. Raises ValueError for other bytes."""
    news: list[News] = []
    try:
        head, _, content = zlib.decompress(message).partition(b"\n")
        values = np.frombuffer(content, dtype="<i8")
        for kind, size, *num_places in json.loads(head):
            rows, values = values[:size].cumsum(), values[size:]
            if isinstance(kind, str):
                news.append(RowDrop(rows, kind))
                continue
            if kind >> len(RULES):
                raise ValueError(f"columns {kind:#x} aren't within a schema of {len(RULES)}")
            lengths = {}
            for name in announced_lengths(kind):
                lengths[name], values = values[:size], values[size:]
            end = 4 * num_places[0]
            news.append(RowMetadata(rows, kind, lengths, values[:end].reshape(-1, 4)))
            values = values[end:]
    except (zlib.error, ValueError) as error:
        raise ValueError(f"{len(message)} bytes are no news of rows ({error}); same version on all ranks?") from error
    return news
