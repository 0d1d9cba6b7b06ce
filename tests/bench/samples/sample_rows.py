"""The rows of the samples bench: the columns of Eq. 2 (arXiv:2507.19017), packed.

One column as long as the prompt, five as long as the response, and three scalars, all of 4 bytes a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PROMPT = "prompt_ids"
RESPONSE_COLUMNS = {
    "response_ids": np.int32,
    "rollout_logprobs": np.float32,
    "versions": np.int32,
    "ref_logprobs": np.float32,
    "old_logprobs": np.float32,
}
SCALARS = {"finished": np.int32, "reward": np.float32, "reward_verdict": np.int32}
ROW_NUMBER = "reward_verdict"
"""holds each row's number, by which a consumer can check that it got every row once"""
COLUMNS = (PROMPT, *RESPONSE_COLUMNS, *SCALARS)
_VALUE_BYTES = 4
# Of the logarithm of log-normal lengths, whose mean is a quarter of the longest before they are cut.
_SPREAD = 0.8


@dataclass(frozen=True)
class RowsSize:
    """How many rows, and how long."""

    num_groups: int
    group_size: int
    prompt_length: int
    response_length: int
    """of the longest response, and in padded rows of all"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} of the rows is {value}, but must be >= 1; choose a larger one")

    @property
    def num_rows(self) -> int:
        return self.num_groups * self.group_size


@dataclass(frozen=True)
class Rows:
    """All rows with their packed columns; a prompt is there once for each of its rows."""

    group_size: int
    offsets: Array
    """where each row's response begins, and the end of the last [B + 1]"""
    columns: Mapping[str, Array]

    @property
    def num_rows(self) -> int:
        return self.offsets.size - 1

    @property
    def prompt_length(self) -> int:
        return self.columns[PROMPT].size // self.num_rows

    @property
    def payload_bytes(self) -> int:
        """Bytes of all values, without offsets."""
        return sum(values.nbytes for values in self.columns.values())

    def part(self, start: int, stop: int) -> Rows:
        """Consecutive rows, as views."""
        first, last = self.offsets[start], self.offsets[stop]
        bounds = {name: slice(first, last) for name in RESPONSE_COLUMNS} | dict.fromkeys(SCALARS, slice(start, stop))
        bounds[PROMPT] = slice(start * self.prompt_length, stop * self.prompt_length)
        columns = {name: values[bounds[name]] for name, values in self.columns.items()}
        return Rows(self.group_size, self.offsets[start : stop + 1] - first, columns)

    def parts(self, num_rows: int) -> Iterator[Rows]:
        """All rows, so many at a time."""
        for start in range(0, self.num_rows, num_rows):
            yield self.part(start, min(start + num_rows, self.num_rows))


def padded_rows(size: RowsSize) -> Rows:
    """Rows whose responses all are as long as the longest."""
    return _rows(size, np.full(size.num_rows, size.response_length))


def ragged_rows(size: RowsSize, seed: int = 0) -> Rows:
    """Rows with responses of log-normal lengths."""
    normal_B = np.random.default_rng((seed, 0)).standard_normal(size.num_rows)
    mean_B = size.response_length / 4 * np.exp(_SPREAD * normal_B - _SPREAD**2 / 2)
    return _rows(size, mean_B.astype(np.int64).clip(1, size.response_length), seed)


def _rows(size: RowsSize, lengths_B: Array, seed: int = 0) -> Rows:
    random = np.random.default_rng((seed, 1))
    offsets = np.concatenate([[0], lengths_B.cumsum()])
    counts = dict.fromkeys(RESPONSE_COLUMNS, int(offsets[-1])) | dict.fromkeys(SCALARS, size.num_rows)
    columns = {
        name: random.integers(0, 1000, counts[name]).astype(dtype)
        for name, dtype in (RESPONSE_COLUMNS | SCALARS).items()
    }
    prompts = random.integers(0, 1000, (size.num_groups, size.prompt_length)).astype(np.int32)
    columns[PROMPT] = prompts.repeat(size.group_size, axis=0).reshape(-1)
    columns[ROW_NUMBER] = np.arange(size.num_rows, dtype=np.int32)
    assert all(values.itemsize == _VALUE_BYTES for values in columns.values()), "Eq. 2 counts values of one size"
    return Rows(size.group_size, offsets, columns)


class KeptMemory:
    """Private memory, allocated at the first copy, so that later ones touch no fresh page."""

    def __init__(self) -> None:
        self._arrays: dict[object, Array] = {}

    def copy(self, place: object, values: Array) -> Array:
        """Copy into what was kept for the place, or into more where that is too small."""
        kept = self._arrays.get(place)
        if kept is None or kept.size < values.size:
            kept = self._arrays[place] = np.empty_like(values)
        out = kept[: values.size]
        np.copyto(out, values)
        return out
