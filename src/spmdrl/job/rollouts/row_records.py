"""Records of each step's rows: digests of their results, by which `replay` compares a row to the bit.

Shape letters: `R` packed response tokens of some rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmdrl.nouns.batch import Batch, offsets_of
from spmdrl.observability.jsonl import JsonlWriter, objects_of
from spmdrl.observability.outage import best_effort
from spmdrl.resources.mesh import UpdateMesh
from spmdrl.resources.world import World

FOLDER = "rows"
_MOST_BYTES = 1 << 25
_COLUMNS = {"tokens": "response_ids", "logprobs": "rollout_logprobs", "advantages": "advantages"}


@dataclass(frozen=True)
class RowDigests:
    """A run's results for one row: digests of 32 bits, of every bit of the values."""

    ranks: int
    """number of ranks of the job that trained it"""
    length: int
    """number of tokens of the response"""
    tokens: str
    logprobs: str
    """the generator's log-probs"""
    advantages: str
    reward: str
    """bits of the float32"""
    trainer: str | None
    """the trainer's log-probs before the step's first update; None if an update excluded the row"""
    loss: str | None
    """each token's term of the loss, in the first update with the row"""


class RowRecords:
    """File of this rank with a line per step; the oldest are dropped beyond 64 MiB per rank."""

    def __init__(self, folder: Path, world: World, mesh: UpdateMesh | None, *, last_step: int):
        """Drop records after `last_step`: it will be repeated. Ranks that don't train have no mesh."""
        self._world = world
        # One of the ranks with the same rows and tokens writes; a pipeline's losses come from its last stage.
        self._is_writer = mesh is not None and mesh.tensor.rank == mesh.context.rank == 0
        self._is_first_stage = mesh is not None and mesh.pipeline.rank == 0
        self._fields: dict[str, Any] = {}
        self._rewards: tuple[Tensor, Tensor] = (torch.empty(0, dtype=torch.int64), torch.empty(0))
        for path in (folder / FOLDER).glob("rank_*.jsonl"):
            # A job of other ranks may have left more files than there are ranks now.
            if int(path.name.split(".")[0].removeprefix("rank_")) % world.size == world.rank:
                writer = JsonlWriter(path)
                writer.truncate_after(last_step)
                writer.close()
        self._path = folder / FOLDER / f"rank_{world.rank:05d}.jsonl"
        self._writer = JsonlWriter(self._path)

    def __enter__(self) -> RowRecords:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def rewarded(self, rows: Tensor, rewards_B: Tensor) -> None:
        self._rewards = (rows, rewards_B)

    def taken(self, batch: Batch) -> None:
        if not self._is_writer:
            return
        rows, rewards_B = self._rewards
        offsets = batch.offsets("response_ids")
        places = RowPlaces(offsets)
        self._fields = {
            "rows": batch.rows.tolist(),
            "lengths": offsets.diff().tolist(),
            "rewards": _hex(rewards_B[torch.searchsorted(rows, batch.rows)].numpy().view(np.uint32)),
        } | {name: _hex(places.digests(batch.values(column))) for name, column in _COLUMNS.items()}

    def trained(self, row_R: Tensor, logprobs_R: Tensor, loss_R: Tensor) -> None:
        if not self._is_writer:
            return
        rows, counts = row_R.unique_consecutive(return_counts=True)
        places = RowPlaces(offsets_of(counts))
        self._fields |= {
            "trained": rows.tolist(),
            "trainer": _hex(places.digests(logprobs_R)),
            "loss": _hex(places.digests(loss_R)),
        }

    def write(self, step: int) -> None:
        """Write the records since the last step, on the ranks that keep records."""
        fields, self._fields = self._fields, {}
        if not self._is_writer or not (self._is_first_stage or fields.get("trained")):
            return
        if self._path.is_file() and self._path.stat().st_size > _MOST_BYTES:
            self._begin_file()
        self._writer.write({"step": step, "ranks": self._world.size} | fields)

    def _begin_file(self) -> None:
        """Rename the file, replacing the older one."""
        self._writer.close()
        with best_effort("the older digests of rows"):
            os.replace(self._path, self._path.with_suffix(".older.jsonl"))
        self._writer = JsonlWriter(self._path)


class RowPlaces:
    """Digests of rows' values that depend on every bit and its place, made without a loop over rows.

    The sum of the values' bits times odd numbers of 64 bits, one per place: two different rows have the same digest
    with a probability of about 2^-32.
    """

    def __init__(self, offsets: Tensor):
        """`offsets` [rows + 1] are those of packed rows."""
        self._bounds = offsets.numpy()
        lengths = np.diff(self._bounds)
        places = np.arange(self._bounds[-1]) - np.repeat(self._bounds[:-1], lengths)
        self._factors = _multipliers(int(lengths.max(initial=0)))[places]

    def digests(self, values: Tensor) -> NDArray[np.uint32]:
        """Return a digest of each row's values, int32 or float32."""
        sums = np.zeros(self._factors.size + 1, np.uint64)
        np.cumsum(values.contiguous().numpy().view(np.uint32) * self._factors, out=sums[1:])
        return ((sums[self._bounds[1:]] - sums[self._bounds[:-1]]) >> np.uint64(32)).astype(np.uint32)


def _multipliers(count: int) -> NDArray[np.uint64]:
    """Return the first numbers of splitmix64, made odd."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)


def _hex(values: NDArray[np.uint32]) -> str:
    """Format each value with eight digits."""
    return values.astype(">u4").tobytes().hex()


def read_row_records(folder: Path, step: int) -> dict[int, RowDigests]:
    """Return a run folder's records of a step's rows, without those of damaged lines."""
    found: dict[int, RowDigests] = {}
    for path in sorted((folder / FOLDER).glob("rank_*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for record in objects_of(line for line in lines if f'"step": {step},' in line):
                for row, one in _rows_of(record):
                    # Of a pipeline's two records the one with the losses.
                    if one.loss is not None or row not in found:
                        found[row] = one
    return found


def _rows_of(record: Mapping[str, Any]) -> Iterator[tuple[int, RowDigests]]:
    trained = {row: place for place, row in enumerate(record.get("trained", ()))}

    def of(name: str, place: int | None) -> str | None:
        return None if place is None else record[name][8 * place : 8 * place + 8]

    for place, row in enumerate(record.get("rows", ())):
        own = {name: record[name][8 * place : 8 * place + 8] for name in _COLUMNS}
        reward, at = record["rewards"][8 * place : 8 * place + 8], trained.get(row)
        yield (
            row,
            RowDigests(
                record["ranks"], record["lengths"][place], **own, reward=reward,
                trainer=of("trainer", at), loss=of("loss", at),
            ),
        )  # fmt: skip
