"""The wire form of a batch: one int64 header and raw tensors, so that payload never is a pickled object.

Header: format, number of rows, number of columns, then for each column its schema number and 1 if it is ragged.
Tensors: the rows [B], then for each column its values [B], or its packed values [T] and offsets [B + 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.dataflow.samples.schema import RULES, check_column, column_number
from spmdrl.types import Batch

FORMAT = 1


def flatten(batch: Batch) -> list[Tensor]:
    """The header followed by the batch's tensors."""
    header = [FORMAT, len(batch), len(batch.names)]
    tensors = [batch.rows]
    for name in batch.names:
        header += [column_number(name), int(batch.is_ragged(name))]
        if batch.is_ragged(name):
            tensors += [batch.values(name), batch.offsets(name)]
        else:
            tensors.append(batch.dense(name))
    return [torch.tensor(header, dtype=torch.int64), *tensors]


def unflatten(tensors: Sequence[Tensor]) -> Batch:
    """The batch of what `flatten` gave; tensors that don't fit their header or the schema are a ValueError."""
    header, *payload = tensors
    numbers = header.tolist()
    if numbers[:1] != [FORMAT] or len(numbers) < 3 or len(numbers) != 3 + 2 * numbers[2]:
        raise ValueError(f"wire header {numbers[:8]} isn't one of format {FORMAT}; do all ranks run the same version?")
    kinds = list(zip(numbers[3::2], numbers[4::2], strict=True))
    expected = 1 + sum(1 + ragged for _, ragged in kinds)
    if len(payload) != expected:
        raise ValueError(f"wire header announces {expected} tensors, but {len(payload)} came with it")
    batch, rest = Batch(_checked_rows(payload[0], numbers[1])), iter(payload[1:])
    for number, ragged in kinds:
        if not 0 <= number < len(RULES):
            raise ValueError(f"wire header names column {number}, but the schema has {len(RULES)} columns")
        name, values = RULES[number].name, next(rest)
        if ragged:
            batch.put_ragged(name, values, _checked_offsets(name, next(rest), values, len(batch)))
        elif values.shape != (len(batch),):
            raise ValueError(f"column {name!r} came with shape {tuple(values.shape)} for {len(batch)} rows")
        else:
            batch.put_dense(name, values)
        check_column(batch, name)
    return batch


def _checked_rows(rows: Tensor, count: int) -> Tensor:
    if rows.dtype != torch.int64 or rows.shape != (count,) or (count and int(rows.min()) < 0):
        raise ValueError(f"wire rows are {rows.dtype} {tuple(rows.shape)}, but must be {count} numbers >= 0")
    return rows


def _checked_offsets(name: str, offsets: Tensor, values: Tensor, count: int) -> Tensor:
    fits = offsets.dtype == torch.int64 and offsets.shape == (count + 1,) and values.ndim == 1
    if not fits or int(offsets[0]) != 0 or int(offsets[-1]) != values.numel() or bool((offsets.diff() < 0).any()):
        raise ValueError(f"offsets of column {name!r} don't cut its {values.numel()} values into {count} rows")
    return offsets
