"""Nouns that every layer shares: worker states, columns, packed batches and weight slices.

Shape letters: `B` rows, `T` packed tokens of those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmdrl.nouns.roles import WorkerState as WorkerState

if TYPE_CHECKING:
    from tensordict import TensorDict

Integers = NDArray[np.int64]
"""Metadata on the host: row numbers, homes, lengths."""


@dataclass(frozen=True)
class Column:
    """One field of a sample: a dense scalar per row, or, if `ragged`, a run of values per row."""

    name: str
    dtype: torch.dtype
    ragged: bool = False


@dataclass(frozen=True)
class WeightSlice:
    """A box of one named weight: along dim d the half-open interval [starts[d], stops[d])."""

    name: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def num_elements(self) -> int:
        count = 1
        for length in self.shape:
            count *= max(length, 0)
        return count

    def intersect(self, other: WeightSlice) -> WeightSlice | None:
        """Return the box that both hold, or None where they share no element."""
        if self.name != other.name:
            return None
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return WeightSlice(self.name, starts, stops)

    def narrowed(self, dim: int, start: int, stop: int) -> WeightSlice:
        """Return the part of the box from start to stop of one dim, counted within it."""
        starts, stops = list(self.starts), list(self.stops)
        starts[dim], stops[dim] = self.starts[dim] + start, self.starts[dim] + stop
        return WeightSlice(self.name, tuple(starts), tuple(stops))

    def index_within(self, outer: WeightSlice) -> tuple[slice, ...]:
        """Return the indexes of this box inside a tensor that holds exactly `outer`."""
        pairs = zip(self.starts, self.stops, outer.starts, strict=True)
        return tuple(slice(start - origin, stop - origin) for start, stop, origin in pairs)


def whole_slice(name: str, shape: Sequence[int]) -> WeightSlice:
    """Return all of a weight of this shape."""
    return WeightSlice(name, (0,) * len(shape), tuple(shape))


_ROWS, _OFFSETS = "rows", "offsets"


class Batch:
    """Rows of packed columns, never padded.

    `rows` are the rows' numbers, int64 [B]. A dense column has its values [B]. A ragged column has its values [T] and
    its offsets [B + 1]: row b has `values[offsets[b]:offsets[b + 1]]`. `data` is all of it as one TensorDict.
    """

    # Plain dicts: a look-up in a TensorDict takes as long as copying some thousand values.
    __slots__ = ("_columns", "_offsets", "rows")

    def __init__(
        self, rows: Tensor, columns: dict[str, Tensor] | None = None, offsets: dict[str, Tensor] | None = None
    ):
        """Take over columns that fit the rows (int64 [B]), ragged ones with offsets."""
        self.rows = rows
        self._columns = {} if columns is None else columns
        self._offsets = {} if offsets is None else offsets

    @classmethod
    def over(cls, data: TensorDict) -> Batch:
        """Return the batch in a TensorDict with the keys of `data`, also once that was moved, mapped or copied.

        Nothing is copied. Raises ValueError if rows or offsets are missing.
        """
        columns: dict[str, Any] = {str(name): leaf for name, leaf in data.items()}
        if missing := sorted({_ROWS, _OFFSETS} - columns.keys()):
            raise ValueError(f"a batch's TensorDict has no {missing}; its keys: {sorted(columns)}")
        offsets = {str(name): leaf for name, leaf in columns.pop(_OFFSETS).items()}
        return cls(columns.pop(_ROWS), columns, offsets)

    @property
    def data(self) -> TensorDict:
        """The same tensors as a new TensorDict: `data["rows"]`, `data[NAME]`, and `data["offsets", NAME]`."""
        # Imported here: it loads Dynamo, which takes longer than the rest of PyTorch.
        from tensordict import TensorDict

        return TensorDict({_ROWS: self.rows, **self._columns, _OFFSETS: self._offsets}, batch_size=[])

    @classmethod
    def of_rows(cls, rows: Iterable[int]) -> Batch:
        return cls(torch.tensor(list(rows), dtype=torch.int64))

    def __len__(self) -> int:
        return self.rows.numel()

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def is_ragged(self, name: str) -> bool:
        return name in self._offsets

    def put_dense(self, name: str, values_B: Tensor) -> None:
        assert values_B.shape == self.rows.shape, (name, tuple(values_B.shape), len(self))
        self._columns[name] = values_B
        self._offsets.pop(name, None)

    def put_ragged(self, name: str, values_T: Tensor, offsets: Tensor) -> None:
        assert offsets.shape == (len(self) + 1,), (name, tuple(offsets.shape), len(self))
        self._columns[name] = values_T
        self._offsets[name] = offsets

    def put_lists(self, name: str, lists_B: Sequence[Sequence[float]], dtype: torch.dtype) -> None:
        """Pack one Python list per row into a ragged column."""
        offsets = offsets_of([len(values) for values in lists_B])
        flat = [value for values in lists_B for value in values]
        self.put_ragged(name, torch.tensor(flat, dtype=dtype), offsets)

    def update(self, other: Batch) -> None:
        """Add the columns of a batch of the same rows."""
        assert self.rows.shape == other.rows.shape, (self.rows.shape, other.rows.shape)
        for name in other._columns:
            self._offsets.pop(name, None)
        self._columns.update(other._columns)
        self._offsets.update(other._offsets)

    def on_host(self, to_host: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Batch:
        """Return the same batch with all tensors on the host and without gradients; itself, if it is such a batch.

        `to_host` copies tensors to the host, and is called once; host tensors are kept as they are.
        """
        # By identity: columns with the same row lengths share their offsets, and go on sharing them.
        leaves = [self.rows, *self._offsets.values(), *self._columns.values()]
        moved = {id(leaf): leaf for leaf in leaves if leaf.requires_grad or not leaf.is_cpu}
        if not moved:
            return self
        copies = to_host([leaf.detach() for leaf in moved.values()])
        host = dict(zip(moved, copies, strict=True))
        columns, offsets = (
            {name: host.get(id(leaf), leaf) for name, leaf in leaves_of.items()}
            for leaves_of in (self._columns, self._offsets)
        )
        return Batch(host.get(id(self.rows), self.rows), columns, offsets)

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Values of each column: dense [B], ragged packed [T]."""
        return self._columns

    def dense(self, name: str) -> Tensor:
        """Return the column's values [B]."""
        assert not self.is_ragged(name), f"{name} is a ragged column"
        return self._columns[name]

    def values(self, name: str) -> Tensor:
        """Return a ragged column's packed values [T]."""
        assert self.is_ragged(name), f"{name} is a dense column"
        return self._columns[name]

    def offsets(self, name: str) -> Tensor:
        """Return a ragged column's offsets [B + 1]."""
        return self._offsets[name]

    def lengths(self, name: str) -> Tensor:
        """Return a ragged column's row lengths [B]."""
        return self.offsets(name).diff()

    def to_lists(self, name: str) -> list[list[Any]]:
        values, bounds = self.values(name).tolist(), self.offsets(name).tolist()
        return [values[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]

    def select(self, positions: Sequence[int] | Tensor, names: Iterable[str] | None = None) -> Batch:
        """Copy the rows at `positions`, in that order, with all columns or the named ones."""
        index = torch.as_tensor(positions, dtype=torch.int64)
        out = Batch(self.rows[index])
        for name in self.names if names is None else names:
            if self.is_ragged(name):
                values, offsets = gather_ragged_rows(self.values(name), self.offsets(name), index)
                out.put_ragged(name, values, offsets)
            else:
                out.put_dense(name, self.dense(name)[index])
        return out

    def num_bytes(self) -> int:
        """Count the bytes of all columns' tensors with offsets, without row numbers."""
        return sum(leaf.nbytes for leaf in (*self._offsets.values(), *self._columns.values()))

    @staticmethod
    def concatenate(batches: Sequence[Batch]) -> Batch:
        """Join the rows of batches that hold the same columns."""
        assert batches, "nothing to concatenate"
        first = batches[0]
        out = Batch(torch.cat([batch.rows for batch in batches]))
        for name in first.names:
            if first.is_ragged(name):
                lengths = torch.cat([batch.lengths(name) for batch in batches])
                out.put_ragged(name, torch.cat([batch.values(name) for batch in batches]), offsets_of(lengths))
            else:
                out.put_dense(name, torch.cat([batch.dense(name) for batch in batches]))
        return out


def offsets_of(lengths: Sequence[int] | Tensor) -> Tensor:
    """Compute offsets [B + 1] of rows with these lengths [B]."""
    if not isinstance(lengths, Tensor):
        return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int64)
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def gather_ragged_rows(values_T: Tensor, offsets: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Gather values and offsets of the ragged rows at `index`, without a Python loop over rows."""
    lengths = offsets.diff()[index]
    out_offsets = offsets_of(lengths)
    shift = (offsets[:-1][index] - out_offsets[:-1]).repeat_interleave(lengths)
    positions = torch.arange(int(out_offsets[-1]), device=values_T.device) + shift.to(values_T.device)
    return values_T[positions], out_offsets


@dataclass(frozen=True)
class CreditSettings:
    """Settings of a run that algorithms credit rewards by, beside their own."""

    part_names: tuple[str, ...]
    """names of the reward functions"""
    part_weights: tuple[float, ...]
    """weights of the reward functions"""
    max_length: int
    """`rollout.max_completion_length`, the most tokens of a row"""
    seed: int = 0
    """seed of the run"""


@dataclass(frozen=True)
class CreditInputs:
    """Inputs of advantages: all rows of a global batch, in row order."""

    rewards_B: Tensor
    """float32; NaN where a row has no usable reward"""
    groups_B: Tensor
    """int64, the prompt that each row answers"""
    lengths_B: Tensor
    """int64, tokens per row that the model wrote; 0 only if an environment couldn't open it, or left no room"""
    columns: Batch
    """columns that the algorithm reads; of response tokens, only the model's"""
    settings: CreditSettings
    step: int = 0
    """selects the random numbers"""

    def of_rows(self, index: Tensor) -> CreditInputs:
        """Return the inputs of some rows only."""
        return replace(
            self,
            rewards_B=self.rewards_B[index],
            groups_B=self.groups_B[index],
            lengths_B=self.lengths_B[index],
            columns=self.columns.select(index),
        )


@dataclass(frozen=True)
class TokenTerms:
    """One micro-batch as the loss gets it: float32, one value per response token of the model."""

    logprobs_R: Tensor
    """under the weights being trained; carries the gradient"""
    entropy_R: Tensor
    columns: Mapping[str, Tensor]
    """[R, ...] each: `weights` and the columns that the algorithm reads"""
    row_of_token_R: Tensor
    """int64, the row within the micro-batch"""
    num_rows: int
    others_RJ: Tensor | None = None
    """log-probs of the teacher's likeliest tokens in each response token's place, then of all others together; carry
    the gradient"""


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, not yet weighted, and metrics by name: values to average, one per token or other unit."""

    loss_R: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class LossScope:
    """Sizes of one optimizer step's set of rows, over all ranks."""

    num_tokens: int
    num_rows: int
    max_length: int
    """`rollout.max_completion_length`, the fixed divisor of seq-mean-token-sum-norm (Dr. GRPO)"""
