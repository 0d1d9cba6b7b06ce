"""Serialised batches, the form in which they travel between nodes.

A frame is an int64 header (format, number of rows, number of columns, then each column's schema number and number of
values, in schema order), then the rows, the offsets and the values, each starting at a multiple of 64 bytes. Columns
with common lengths share one offsets array. Header and schema determine all positions: a frame contains none, so a
corrupt one can't point outside itself, and no pickled object.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmdrl.dataflow.samples.schema import LENGTHS_OF, RULES, check_column, column_number
from spmdrl.nouns.batch import Batch

ALIGNMENT = 64
"""bytes: a cache line, and a multiple of every dtype's size"""

_FORMAT = int.from_bytes(b"spmdrl\x00\x02", "little")
_WORD = 8
_FIXED_WORDS = 3

_DTYPES = {rule.name: rule.column.dtype for rule in RULES}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}
_INT64 = np.dtype(np.int64)

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in _DTYPES.items()
}
"""The dtype of each column's values as an array."""


class FrameError(ValueError):
    """Bytes that are no frame of this schema."""


class _Layout(NamedTuple):
    """Starts of a frame's parts in bytes: values by column, offsets by the column of the lengths."""

    rows: int
    offsets: dict[str, int]
    values: dict[str, int]
    num_bytes: int


def frame_bytes(num_rows: int, num_values: Mapping[str, int]) -> int:
    """Return the bytes of a frame with `num_rows` rows and these numbers of values by column (dense: `num_rows`)."""
    return _layout(num_rows, {name: num_values[name] for name in _in_schema_order(tuple(num_values))}).num_bytes


class CheckedColumns:
    """A batch's columns as arrays, in schema order. Raises ValueError for what breaks the schema."""

    def __init__(self, batch: Batch):
        """Columns with the same row lengths must have equal offsets, which are kept once, by the lengths' column."""
        self.values: dict[str, NDArray[Any]] = {}
        self.offsets: dict[str, NDArray[np.int64]] = {}
        shared: dict[str, tuple[Tensor, int]] = {}
        for name in _in_schema_order(tuple(batch.columns)):
            tensor, lengths, is_ragged = batch.columns[name], LENGTHS_OF[name], batch.is_ragged(name)
            if tensor.dtype != _DTYPES[name] or is_ragged != (lengths is not None):
                check_column(batch, name)
            self.values[name] = values = tensor.numpy()
            if lengths is None:
                continue
            offsets = batch.offsets(name)
            if lengths not in shared:
                self.offsets[lengths] = bounds = offsets.numpy()
                shared[lengths] = offsets, _checked_end(lengths, bounds)
            known, end = shared[lengths]
            if known is not offsets:
                _check_same(name, lengths, self.offsets[lengths], offsets.numpy())
            _check_count(name, values.size, end)


class OutgoingFrame:
    """A batch to write. Raises ValueError for columns that break the schema."""

    def __init__(self, batch: Batch):
        self._rows = batch.rows.numpy()
        self._columns = CheckedColumns(batch)
        self._layout = _layout(len(batch), {name: values.size for name, values in self._columns.values.items()})

    @property
    def num_bytes(self) -> int:
        return self._layout.num_bytes

    def write(self, out: Tensor) -> None:
        """Copy the batch into uint8 memory [num_bytes]."""
        if out.shape != (self.num_bytes,) or out.dtype != torch.uint8:
            raise ValueError(f"a frame of {self.num_bytes} bytes doesn't fit {out.dtype} {tuple(out.shape)}")
        memory, layout, columns = out.numpy(), self._layout, self._columns
        table = [word for name, values in columns.values.items() for word in (column_number(name), values.size)]
        head = (_FORMAT, self._rows.size, len(columns.values))
        struct.pack_into(f"={_FIXED_WORDS + len(table)}q", memory.data, 0, *head, *table)
        _store(memory, layout.rows, self._rows)
        for lengths, start in layout.offsets.items():
            _store(memory, start, columns.offsets[lengths])
        for name, start in layout.values.items():
            _store(memory, start, columns.values[name])


def pack(batch: Batch) -> Tensor:
    """Return the batch's frame in memory of its own, on the host."""
    outgoing = OutgoingFrame(batch)
    frame = torch.empty(outgoing.num_bytes, dtype=torch.uint8)
    outgoing.write(frame)
    return frame


def read_frame(frame: Tensor) -> Batch:
    """Return the batch in a frame (uint8 [num_bytes]), as views of its memory.

    Raises FrameError for anything but a frame of this schema.
    """
    num_rows, num_values = _read_header(frame)
    layout = _layout(num_rows, num_values)
    memory = frame.numpy()
    if layout.num_bytes != memory.size:
        raise FrameError(f"a frame of {memory.size} bytes announces {layout.num_bytes}")
    rows = _part(memory, layout.rows, num_rows, _INT64)
    if rows.size and rows.min() < 0:
        raise FrameError(f"a frame has row {rows.min()}, but rows count from 0")
    shared = {lengths: _part(memory, start, num_rows + 1, _INT64) for lengths, start in layout.offsets.items()}
    ends = {lengths: _checked_end(lengths, part) for lengths, part in shared.items()}
    offsets = {lengths: torch.from_numpy(part) for lengths, part in shared.items()}
    batch = Batch(torch.from_numpy(rows))
    for name, start in layout.values.items():
        count, lengths = num_values[name], LENGTHS_OF[name]
        values = torch.from_numpy(_part(memory, start, count, NUMPY_DTYPES[name]))
        if lengths is None:
            batch.put_dense(name, values)
        else:
            _check_count(name, count, ends[lengths])
            batch.put_ragged(name, values, offsets[lengths])
    return batch


def values_of(names: Iterable[str], sizes: Mapping[str, Any], start: Any) -> tuple[dict[str, Any], Any]:
    """Return where each column's values begin if stored in order from byte `start` on, and the end of all.

    `names` are in schema order; `sizes` are numbers of values by column. Sizes and `start` may be arrays over many
    runs. A column's place is an index into an array of its own dtype.
    """
    places = {}
    for name in names:
        item_bytes = _ITEM_BYTES[name]
        places[name] = start // item_bytes
        start = start + _aligned(item_bytes * sizes[name])
    return places, start


@functools.lru_cache
def _in_schema_order(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(names, key=column_number))


def _layout(num_rows: int, num_values: Mapping[str, int]) -> _Layout:
    """Lay out columns given in schema order. Plain integers, so that no count overflows."""
    rows = _aligned(_WORD * (_FIXED_WORDS + 2 * len(num_values)))
    end = rows + _aligned(_WORD * num_rows)
    offsets: dict[str, int] = {}
    for name in num_values:
        lengths = LENGTHS_OF[name]
        if lengths is not None and lengths not in offsets:
            offsets[lengths], end = end, end + _aligned(_WORD * (num_rows + 1))
    values: dict[str, int] = {}
    for name, count in num_values.items():
        values[name], end = end, end + _aligned(_ITEM_BYTES[name] * count)
    return _Layout(rows, offsets, values, end)


def _aligned(num_bytes: Any) -> Any:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _store(memory: NDArray[np.uint8], start: int, source: NDArray[Any]) -> None:
    memory[start : start + source.nbytes].view(source.dtype)[:] = source


def _read_header(frame: Tensor) -> tuple[int, dict[str, int]]:
    """Return the number of rows, and each column's number of values; not yet checked against the frame's size."""
    if frame.dtype != torch.uint8 or frame.ndim != 1 or not frame.is_contiguous() or frame.device.type != "cpu":
        raise FrameError(f"a frame is a run of bytes on the host, not {frame.dtype} {tuple(frame.shape)}")
    size = frame.numel()
    if size < ALIGNMENT or size % ALIGNMENT or frame.storage_offset() % _WORD:
        raise FrameError(f"{size} bytes from byte {frame.storage_offset()} of their memory are no whole frame")
    words = frame.numpy().view(np.int64)
    kind, num_rows, num_columns = words[:_FIXED_WORDS].tolist()
    if kind != _FORMAT:
        raise FrameError(f"a frame begins with {_FORMAT:#x}, not {kind:#x}; do all ranks run the same version?")
    if num_rows < 0 or not 0 <= num_columns <= min(len(RULES), (words.size - _FIXED_WORDS) // 2):
        raise FrameError(f"{size} bytes don't hold the {num_rows} rows of {num_columns} columns that they announce")
    table = words[_FIXED_WORDS : _FIXED_WORDS + 2 * num_columns].tolist()
    _check_table(num_rows, table[::2], table[1::2])
    return num_rows, {RULES[number].name: count for number, count in zip(table[::2], table[1::2], strict=True)}


def _check_table(num_rows: int, numbers: list[int], num_values: list[int]) -> None:
    before = -1
    for number, count in zip(numbers, num_values, strict=True):
        if not before < number < len(RULES):
            raise FrameError(f"columns {numbers} of a frame must ascend and be numbers of {len(RULES)} columns")
        if count < 0 or (not RULES[number].column.ragged and count != num_rows):
            raise FrameError(f"column {RULES[number].name!r} announces {count} values in {num_rows} rows")
        before = number


def _part(memory: NDArray[np.uint8], start: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `count` values from byte `start` on."""
    return memory[start : start + count * dtype.itemsize].view(dtype)


def _check_count(name: str, num_values: int, end: int) -> None:
    if num_values != end:
        raise FrameError(f"offsets of column {name!r} end at {end}, but it has {num_values} values")


def _check_same(name: str, lengths: str, known: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
    # Bytes compare faster; with other dtypes the values must be equal.
    if known.tobytes() != offsets.tobytes() and not np.array_equal(known, offsets):
        raise ValueError(
            f"column {name!r} has other row lengths than the columns beside it, but the schema says that all of "
            f"them have those of {lengths!r}; put it with one value for each of that column's"
        )


def _checked_end(lengths: str, bounds: NDArray[np.int64]) -> int:
    """Return the last of the offsets of this column's lengths, after a check that they cut values into rows."""
    # Compared, not subtracted: a difference of two int64 may overflow.
    if bounds.item(0) != 0 or np.count_nonzero(bounds[1:] < bounds[:-1]):
        raise FrameError(f"offsets of column {lengths!r} must begin with 0 and never fall")
    return bounds.item(-1)
