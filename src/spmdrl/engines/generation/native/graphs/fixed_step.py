"""A decoding step of fixed sizes at fixed addresses, which takes nothing from the host while it runs.

What it reads is one block of integers, copied to the device at once, and the tokens that the step before left there. So
it can be captured as a graph, and the next one can be started before the host has read what this one drew.

Shape letters: `B` rows, padded, `C` blocks of a table, padded, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.generation.native.cache.blocks import SCRATCH_BLOCK
from spmdrl.engines.generation.native.cache.cached_attention import PagedDecodeAttention
from spmdrl.engines.generation.native.cache.paged import PagedCache
from spmdrl.engines.generation.native.running_rows import Row
from spmdrl.engines.generation.native.sampling import RowSampling, SamplingKinds, draw
from spmdrl.engines.generation.protocol import SamplingParams
from spmdrl.engines.models.kernels.plain import LEAST_ROWS
from spmdrl.engines.models.layers import Attend

# Columns of a step's integers; a row's block table follows them.
_GIVEN, _SOURCE, _LENGTH, _TABLE = range(4)
_NONE = -1
_LEAST_WIDTH = 16


@dataclass(frozen=True)
class StepShape:
    """What is fixed in a step; each has a graph of its own."""

    num_rows: int
    width: int
    """Blocks of a table."""
    sampling: SamplingKinds


def padded_rows(num_rows: int) -> int:
    """The least of 4, 8, 12, 16, 24, 32, 48, 64, 96, ... that is not below: at most a third of it is padding."""
    quarter = -(-num_rows // LEAST_ROWS)
    power = 1 << max(quarter - 1, 0).bit_length()
    return LEAST_ROWS * (power * 3 // 4 if power >= 4 and quarter <= power * 3 // 4 else power)


def padded_width(num_blocks: int) -> int:
    """The least of 16, 64, 256, ... that is not below: what no row fills costs next to nothing."""
    width = _LEAST_WIDTH
    while width < num_blocks:
        width *= 4
    return width


@dataclass(frozen=True)
class FedRow:
    """A row of a step: its newest token is given, or is what another step drew, at this place, and left here."""

    row: Row
    source: int | None


def step_integers(rows: Sequence[FedRow], shape: StepShape) -> Tensor:
    """What the step is fed, int32 [B, 3 + C]; rows that only pad it write into the scratch block."""
    integers = torch.zeros((shape.num_rows, _TABLE + shape.width), dtype=torch.int32)
    integers[:, _SOURCE] = _NONE
    integers[:, _LENGTH] = 1
    integers[:, _TABLE:] = SCRATCH_BLOCK
    numbers = integers.numpy()
    for place, fed in enumerate(rows):
        row = fed.row
        given, source = (row.token_ids[-1], _NONE) if fed.source is None else (0, fed.source)
        numbers[place, :_TABLE] = given, source, row.length
        numbers[place, _TABLE : _TABLE + len(row.table)] = row.table
    return integers


@dataclass(frozen=True)
class _Buffers:
    """What a step reads and writes, for the most rows."""

    integers: Tensor
    tokens_B: Tensor
    logprobs_B: Tensor
    sampling: RowSampling

    @classmethod
    def of(cls, num_rows: int, width: int, device: torch.device) -> _Buffers:
        return cls(
            torch.zeros(num_rows * (_TABLE + width), dtype=torch.int32, device=device),
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
        logits: Callable[[Tensor, Tensor, Attend], Tensor],
        cache: PagedCache,
        device: torch.device,
        max_rows: int,
    ):
        """`logits` gives those [B, V] of tokens, positions and attention. Memory is taken by `make_room`."""
        self._logits = logits
        self._cache = cache
        self._max_rows = padded_rows(max_rows)
        self._width = 0
        self._device = device
        self._held: _Buffers | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._held is None else self._held.num_bytes

    @property
    def drawn(self) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs of the newest step's rows, where it leaves them."""
        return self._buffers.tokens_B, self._buffers.logprobs_B

    @property
    def _buffers(self) -> _Buffers:
        assert self._held is not None, "the step has no memory"
        return self._held

    def make_room(self, width: int) -> bool:
        """Take memory for tables of `width` blocks; returns whether addresses changed, and with them all contents."""
        if self._held is not None and width <= self._width:
            return False
        self._held, self._width = _Buffers.of(self._max_rows, width, self._device), width
        return True

    def release(self) -> None:
        """Free the memory."""
        self._held = None

    def feed(self, integers: Tensor) -> None:
        """Take what the next step is fed (`step_integers`), from pinned memory without waiting for the copy."""
        self._integers(*integers.shape).copy_(integers, non_blocking=True)

    def set_sampling(self, sampling: RowSampling) -> None:
        """Draw the first rows so from the next step on."""
        for own, given in zip(self._buffers.sampling.columns, sampling.columns, strict=True):
            own[: len(given)].copy_(given)

    def __call__(self, shape: StepShape) -> None:
        """Run with what was fed; fills the first rows of what was drawn."""
        num_rows, integers = shape.num_rows, self._integers(shape.num_rows, _TABLE + shape.width)
        tokens_B, logprobs_B = (values[:num_rows] for values in self.drawn)
        source_B, lengths_B = (integers[:, column].to(torch.int64) for column in (_SOURCE, _LENGTH))
        drawn_before_B = self._buffers.tokens_B[source_B.clamp(min=0)]
        fed_B = torch.where(source_B == _NONE, integers[:, _GIVEN].to(torch.int64), drawn_before_B)
        attend = PagedDecodeAttention(self._cache, integers[:, _TABLE:], integers[:, _LENGTH])
        logits_BV = self._logits(fed_B, lengths_B - 1, attend).float()
        columns = (column[:num_rows] for column in self._buffers.sampling.columns)
        drawn = draw(logits_BV, lengths_B, RowSampling(*columns, shape.sampling))
        tokens_B.copy_(drawn.tokens_B)
        logprobs_B.copy_(drawn.logprobs_B)

    def _integers(self, num_rows: int, num_columns: int) -> Tensor:
        return self._buffers.integers[: num_rows * num_columns].view(num_rows, num_columns)
