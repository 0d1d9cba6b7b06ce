"""News of rows, as ranks exchange them, and the catalogue that observes them: facts for all worker states."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spmdrl.dataflow.samples.schema import RULES, columns_mask, length_column, mask_of, names_of_mask, rule_of
from spmdrl.nouns.batch import Batch, Integers
from spmdrl.resources.collectives import gather_and_agree

_NOT_DROPPED = -1


def _no_places() -> Integers:
    return np.empty((0, 4), dtype=np.int64)


@dataclass(frozen=True)
class RowMetadata:
    """News of rows: their new columns, lengths of ragged ones, and places in memory.

    rows [B]; columns is a mask of schema bits; lengths maps each ragged column with lengths of its own to int64 [B].
    places [frames, 4] are the frames in the node's shared memory that hold these rows in order: writer, start, bytes
    and number of rows of each; none if a rank is alone on its node.
    """

    rows: Integers
    columns: int
    lengths: Mapping[str, Integers]
    places: Integers = field(default_factory=_no_places)


@dataclass(frozen=True)
class RowDrop:
    """News of rows that won't be trained on, with the reason."""

    rows: Integers
    reason: str


News = RowMetadata | RowDrop


def metadata_of(batch: Batch, place: Sequence[int] | None = None) -> RowMetadata:
    """Return the news of a batch that was stored, in shared memory at `place` (writer, start, bytes)."""
    columns = mask_of(tuple(batch.columns))
    bounds = {name: batch.offsets(name).numpy() for name in announced_lengths(columns)}
    lengths = {name: offsets[1:] - offsets[:-1] for name, offsets in bounds.items()}
    places = _no_places() if place is None else np.array([[*place, len(batch)]], dtype=np.int64)
    return RowMetadata(batch.rows.numpy(), columns, lengths, places)


@functools.lru_cache
def announced_lengths(columns: int) -> tuple[str, ...]:
    """Return the columns of this mask whose row lengths travel in metadata, in schema order."""
    ragged = [name for name in names_of_mask(columns) if rule_of(name).column.ragged]
    return tuple(name for name in ragged if length_column(name) == name)


def joined(news: Iterable[News]) -> list[News]:
    """Join news into as few entries as possible: metadata of the same columns, and drops for the same reason."""
    metadata: dict[int, list[RowMetadata]] = {}
    drops: dict[str, list[RowDrop]] = {}
    for entry in news:
        if isinstance(entry, RowMetadata):
            metadata.setdefault(entry.columns, []).append(entry)
        else:
            drops.setdefault(entry.reason, []).append(entry)
    # A rank may drop a row again before the next commit.
    dropped = [RowDrop(np.unique(np.concatenate([one.rows for one in same])), why) for why, same in drops.items()]
    return [*map(_join, metadata.values()), *dropped]


def _join(entries: list[RowMetadata]) -> RowMetadata:
    if len(entries) == 1:
        return entries[0]
    columns = entries[0].columns
    return RowMetadata(
        np.concatenate([entry.rows for entry in entries]),
        columns,
        {name: np.concatenate([entry.lengths[name] for entry in entries]) for name in announced_lengths(columns)},
        np.concatenate([entry.places for entry in entries]),
    )


class Catalogue:
    """Homes, columns, lengths and drops of rows; row r belongs to group r // group_size, which has one home.

    Its content depends on the observed news, not on their order.
    """

    def __init__(self, homes: Integers, group_size: int = 1):
        """`homes` [num_rows]: the warehouse of each row, which is the same for all rows of a group."""
        if group_size < 1 or homes.size % group_size:
            raise ValueError(f"{homes.size} rows don't divide into groups of {group_size}; use a multiple of it")
        self.homes = homes
        self.num_rows = num_rows = homes.size
        self.group_size = group_size
        self.version = 0
        """changes with all news, so that answers can be cached until then"""
        self.columns: Integers = np.zeros(num_rows, dtype=np.int64)
        """a mask of schema bits per row"""
        self._lengths: dict[str, Integers] = {}
        self._reasons: list[str] = []
        self._reason: Integers = np.full(num_rows, _NOT_DROPPED, dtype=np.int64)

    def observe(self, entry: News) -> None:
        """Record columns or drops. Raises ValueError, and records nothing, for contradictory news."""
        if isinstance(entry, RowDrop):
            self.drop(entry.rows, entry.reason)
        else:
            self._add_columns(entry)

    def drop(self, rows: ArrayLike, reason: str) -> None:
        """Drop rows for good. Of several reasons the alphabetically first stays."""
        index = self._within(rows)
        if reason not in self._reasons:
            self._reasons.append(reason)
        # The last entry, at index _NOT_DROPPED, stands for rows that weren't dropped before.
        gives_way = np.array([reason < known for known in self._reasons] + [True])
        self._reason[index[gives_way[self._reason[index]]]] = self._reasons.index(reason)
        self.version += 1

    @property
    def is_dropped(self) -> NDArray[np.bool_]:
        """True for each dropped row [num_rows]."""
        return self._reason != _NOT_DROPPED

    def lengths(self, name: str, rows: Integers | None = None) -> Integers:
        """Return lengths of all rows [num_rows] or some [B] in a ragged column, -1 if not yet there."""
        index = slice(None) if rows is None else rows
        present = (self.columns[index] & columns_mask([name])) != 0
        return np.where(present, self._lengths_of(length_column(name))[index], -1)

    def num_values(self, name: str, rows: Integers) -> Integers:
        """Return numbers of values of some rows [B] in a ragged column, 0 if not yet there."""
        return self._lengths_of(length_column(name)).take(rows)

    def num_dropped(self, rows: Integers) -> dict[str, int]:
        """Count these dropped rows by reason."""
        counts = np.bincount(self._reason[rows], minlength=len(self._reasons)).tolist()
        return {reason: count for reason, count in sorted(zip(self._reasons, counts, strict=True)) if count}

    def rows_by_reason(self) -> Mapping[str, Integers]:
        """Return the rows that were dropped for each reason."""
        return {reason: np.flatnonzero(self._reason == code) for code, reason in enumerate(self._reasons)}

    def checked(self, rows: ArrayLike) -> Integers:
        """Return row numbers as an array. Raises ValueError for one outside of the batch, or repeated."""
        index = self._within(rows)
        twice = self._named_twice(index)
        if twice is not None:
            raise ValueError(f"row {twice} is named twice among {index.size} rows; name each row once")
        return index

    def _within(self, rows: ArrayLike) -> Integers:
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= self.num_rows):
            raise ValueError(f"rows {index.min()}..{index.max()} lie outside of the batch's 0..{self.num_rows - 1}")
        return index

    def _add_columns(self, metadata: RowMetadata) -> None:
        rows = self._within(metadata.rows)
        if not rows.size:
            return
        self._refuse_repeated(rows, metadata.columns)
        for name, lengths in metadata.lengths.items():
            if lengths.min() < 0:
                raise ValueError(f"row {rows[lengths.argmin()]} can't have {lengths.min()} values of {name!r}")
        self.columns[rows] |= metadata.columns
        for name, lengths in metadata.lengths.items():
            self._lengths_of(name)[rows] = lengths
        self.version += 1

    def _refuse_repeated(self, rows: Integers, columns: int) -> None:
        known = (self.columns[rows] & columns) != 0
        twice = int(rows[known.argmax()]) if known.any() else self._named_twice(rows)
        if twice is not None:
            names = names_of_mask(int(self.columns[twice]) & columns or columns)
            raise ValueError(f"columns {names} of row {twice} are announced twice; one state makes each once")

    def _lengths_of(self, name: str) -> Integers:
        return self._lengths.setdefault(name, np.zeros(self.num_rows, dtype=np.int64))

    def _named_twice(self, rows: Integers) -> int | None:
        """Return a repeated row, if any."""
        seen = np.zeros(self.num_rows, dtype=np.bool_)
        seen[rows] = True
        if np.count_nonzero(seen) == rows.size:
            return None
        return int(np.bincount(rows).argmax())


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
    """Encode news as one message; `joined` news take the least room.

    A zlib stream: a line of JSON that lists the entries, then their arrays as int64, row numbers as differences between
    neighbours. Most of these bytes are zeros; a row takes one to three compressed bytes.
    """
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
