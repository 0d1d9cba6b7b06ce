"""A decoding step of fixed sizes at fixed addresses, which takes nothing from the host while it runs.

Its inputs are one block of integers, copied to the device at once, and the tokens that the previous step left there. So
it can be captured as a graph, and the next one can start before the host has read this one's tokens.

Shape letters: `B` rows, padded, `C` blocks of a table, padded, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.generation.native.cached_attention import DecodeAttention
from spmdrl.engines.generation.native.paged import SCRATCH_BLOCK, StateCache
from spmdrl.engines.generation.native.running_rows import Row
from spmdrl.engines.generation.native.sampling import RowSampling, SamplingKinds, draw
from spmdrl.engines.models.layers import Mix
from spmdrl.nouns.settings.rollout_config import SamplingParams

# Columns of a step's integers; a row's tables, one of each kind of state, follow them.
_GIVEN, _SOURCE, _LENGTH, _TABLE = range(4)
_NONE = -1
_LEAST_WIDTH = 16
_LEAST_ROWS = 4


@dataclass(frozen=True)
class StepShape:
    """Fixed sizes of a step; each shape has a graph of its own."""

    num_rows: int
    width: int
    """Number of blocks in a table that grows."""
    sampling: SamplingKinds


def padded_rows(num_rows: int) -> int:
    """Round up to one of 4, 8, 12, 16, 24, 32, 48, 64, 96, ...: at most a third is padding."""
    quarter = -(-num_rows // _LEAST_ROWS)
    power = 1 << max(quarter - 1, 0).bit_length()
    return _LEAST_ROWS * (power * 3 // 4 if power >= 4 and quarter <= power * 3 // 4 else power)


def padded_width(num_blocks: int) -> int:
    """Round up to one of 16, 64, 256, ...: unused columns cost next to nothing."""
    width = _LEAST_WIDTH
    while width < num_blocks:
        width *= 4
    return width


@dataclass(frozen=True)
class FedRow:
    """A row of a step: its newest token is given, or still on the device at this place of the previous step."""

    row: Row
    source: int | None


class StepIntegers:
    """A step's integers, written on the host; kept between steps, since most tables don't change."""

    def __init__(self, max_rows: int, widths: Sequence[int]):
        """Take the widths of a row's tables."""
        self._integers = torch.zeros((padded_rows(max_rows), _TABLE + sum(widths)), dtype=torch.int32)
        self._numbers = self._integers.numpy()
        self._starts = [_TABLE + sum(widths[:place]) for place in range(len(widths))]
        self._written: list[tuple[Row, list[tuple[int, int]]] | None] = [None] * len(self._integers)
        """Row of each place, with the length and last block of its tables; None for padding."""

    def fill(self, rows: Sequence[FedRow], num_rows: int) -> Tensor:
        """Write integers [B, 3 + C] of these rows, valid until the next call; padding writes into the scratch block."""
        numbers, fed = self._numbers, [row.row for row in rows]
        for place, row in enumerate(fed):
            written = (row, [(len(table), table[-1]) for table in row.tables])
            # A table changes at its end only: it gets another block, or a copy of the last one. Blocks that a window
            # has left aren't read.
            if written != self._written[place]:
                numbers[place, _TABLE:] = SCRATCH_BLOCK
                for start, table in zip(self._starts, row.tables, strict=True):
                    numbers[place, start : start + len(table)] = table
                self._written[place] = written
        for place in range(len(rows), num_rows):
            if self._written[place] is not None:
                numbers[place, _TABLE:], self._written[place] = SCRATCH_BLOCK, None
        padding = [0] * (num_rows - len(rows))
        given = [row.row.token_ids[-1] if row.source is None else 0 for row in rows]
        sources = [_NONE if row.source is None else row.source for row in rows]
        numbers[:num_rows, _GIVEN] = given + padding
        numbers[:num_rows, _SOURCE] = sources + [_NONE] * len(padding)
        numbers[:num_rows, _LENGTH] = [row.length for row in fed] + [1] * len(padding)
        return self._integers[:num_rows]


@dataclass(frozen=True)
class _Buffers:
    """Inputs and outputs of steps, for the most rows."""

    integers: Tensor
    tokens_B: Tensor
    logprobs_B: Tensor
    sampling: RowSampling

    @classmethod
    def of(cls, num_rows: int, num_columns: int, device: torch.device) -> _Buffers:
        return cls(
            torch.zeros(num_rows * num_columns, dtype=torch.int32, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.float32, device=device),
            RowSampling.of_rows([0] * num_rows, [SamplingParams()] * num_rows, device),
        )

    @property
    def num_bytes(self) -> int:
        own = (self.integers, self.tokens_B, self.logprobs_B, *self.sampling.columns)
        return sum(tensor.nbytes for tensor in own)


class FixedStep:
    """One token of every row: fed, attended from the cache, drawn and left on the device."""

    def __init__(
        self,
        logits: Callable[[Tensor, Tensor, Mix], Tensor],
        cache: StateCache,
        device: torch.device,
        max_rows: int,
        never: Tensor | None = None,
    ):
        """`logits` returns [B, V] for tokens, positions and attention; `make_room` allocates memory."""
        self._logits = logits
        self._cache = cache
        self._max_rows = padded_rows(max_rows)
        self.width = 0
        """Blocks per growing table that the memory has room for."""
        self._device = device
        self._never = never
        self._held: _Buffers | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._held is None else self._held.num_bytes

    @property
    def drawn(self) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs of the newest step's rows, at their fixed addresses."""
        return self._buffers.tokens_B, self._buffers.logprobs_B

    @property
    def _buffers(self) -> _Buffers:
        assert self._held is not None, "the step has no memory"
        return self._held

    def make_room(self, width: int) -> bool:
        """Allocate for tables of `width` blocks; returns True if addresses changed, which loses all contents."""
        if self._held is not None and width <= self.width:
            return False
        num_columns = _TABLE + sum(self.widths(width))
        self._held, self.width = _Buffers.of(self._max_rows, num_columns, self._device), width
        return True

    def widths(self, width: int) -> list[int]:
        """Return the widths of a row's tables, of which those of blocks have `width`."""
        return [1 if kind.is_slot else width for kind in self._cache.kinds]

    def release(self) -> None:
        """Free the memory."""
        self._held = None

    def feed(self, integers: Tensor) -> None:
        """Copy the next step's input (`StepIntegers`) from pinned memory without waiting."""
        self._integers(*integers.shape).copy_(integers, non_blocking=True)

    def set_sampling(self, sampling: RowSampling) -> None:
        """Set the sampling of the first rows from the next step on."""
        for own, given in zip(self._buffers.sampling.columns, sampling.columns, strict=True):
            own[: len(given)].copy_(given)

    def __call__(self, shape: StepShape) -> None:
        """Run on the fed input; fills the first rows of `drawn`."""
        num_rows, widths = shape.num_rows, self.widths(shape.width)
        integers = self._integers(num_rows, _TABLE + sum(widths))
        tokens_B, logprobs_B = (values[:num_rows] for values in self.drawn)
        source_B, lengths_B = (integers[:, column].to(torch.int64) for column in (_SOURCE, _LENGTH))
        drawn_before_B = self._buffers.tokens_B[source_B.clamp(min=0)]
        fed_B = torch.where(source_B == _NONE, integers[:, _GIVEN].to(torch.int64), drawn_before_B)
        attend = DecodeAttention(self._cache, integers[:, _TABLE:].split(widths, dim=1), integers[:, _LENGTH])
        logits_BV = self._logits(fed_B, lengths_B - 1, attend).float()
        columns = (column[:num_rows] for column in self._buffers.sampling.columns)
        drawn = draw(logits_BV, lengths_B, RowSampling(shape.sampling, *columns), self._never)
        tokens_B.copy_(drawn.tokens_B)
        logprobs_B.copy_(drawn.logprobs_B)

    def _integers(self, num_rows: int, num_columns: int) -> Tensor:
        return self._buffers.integers[: num_rows * num_columns].view(num_rows, num_columns)
