"""Batches on disk: the rows' replicated metadata, and each node's payload; readable on any nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.dataflow.samples.catalogue import Catalogue, RowMetadata, announced_lengths
from spmdrl.dataflow.samples.row_lives import RowLives, RowStatus
from spmdrl.dataflow.samples.schema import PROMPT_COLUMNS, RULES, columns_mask, names_of_mask
from spmdrl.dataflow.samples.store.warehouse import Warehouse
from spmdrl.nouns.batch import Batch, Integers

Arrays = dict[str, NDArray[np.generic]]
LIVES = "rows.safetensors"
_NODE_FILES = "node_*.safetensors"


def snapshot(lives: RowLives) -> Arrays:
    """Return the lives as arrays, equal on all ranks between two commits.

    Claims aren't saved, as their holders end with the job. Raises ValueError for a claimed row that already has a
    column of the claiming state, which can't be made again.
    """
    catalogue = lives.catalogue
    _refuse_half_made(lives)
    names = names_of_mask(int(np.bitwise_or.reduce(catalogue.columns, initial=0)))
    reasons = {reason: rows for reason, rows in sorted(catalogue.rows_by_reason().items()) if rows.size}
    out: Arrays = {
        "batch": np.array([lives.step, catalogue.num_rows, catalogue.group_size], dtype=np.int64),
        "reasons": np.frombuffer(json.dumps(list(reasons)).encode(), dtype=np.uint8),
    }
    out |= {f"dropped/{number}": rows for number, rows in enumerate(reasons.values())}
    out |= {f"has/{name}": (catalogue.columns & columns_mask([name])) != 0 for name in names}
    out |= {f"lengths/{name}": catalogue.lengths(name) for name in announced_lengths(columns_mask(names))}
    for state, controller in lives.controllers.items():
        out[f"consumed/{state.value}"] = controller.rows_with(RowStatus.CONSUMED)
    return out


def _refuse_half_made(lives: RowLives) -> None:
    for state, controller in lives.controllers.items():
        claimed = controller.rows_with(RowStatus.CLAIMED)
        made = columns_mask(rule.name for rule in RULES if rule.made_by is state)
        half_made = claimed[(lives.catalogue.columns[claimed] & made) != 0]
        if half_made.size:
            raise ValueError(
                f"row {half_made[0]} is claimed for {state.value}, but has its columns already; finish "
                f"{state.value} before saving"
            )


def restored(saved: Arrays, fresh: RowLives) -> RowLives:
    """Return the lives that `snapshot` saved, with rows at the homes that `fresh`, of the same step, gives them.

    Raises ValueError for another step, or another set of rows or worker states than the saved one.
    """
    shape, catalogue = saved["batch"].tolist(), fresh.catalogue
    expected = [fresh.step, catalogue.num_rows, catalogue.group_size]
    if shape != expected:
        raise ValueError(f"saved were step, rows and responses per prompt {shape}, but they are {expected}")
    kept = sorted(key.removeprefix("consumed/") for key in saved if key.startswith("consumed/"))
    wanted = sorted(state.value for state in fresh.controllers)
    if kept != wanted:
        raise ValueError(f"rows were saved with states {', '.join(kept)}, but the run has {', '.join(wanted)}")
    needs = {state: controller.needs for state, controller in fresh.controllers.items()}
    lives = RowLives(needs, catalogue.homes, step=fresh.step, group_size=catalogue.group_size)
    for name in (key.removeprefix("has/") for key in saved if key.startswith("has/")):
        rows, columns = np.flatnonzero(saved[f"has/{name}"]), columns_mask([name])
        lengths = {key: saved[f"lengths/{key}"].astype(np.int64)[rows] for key in announced_lengths(columns)}
        lives.observe([RowMetadata(rows, columns, lengths)])
    for number, reason in enumerate(json.loads(saved["reasons"].tobytes())):
        lives.catalogue.drop(saved[f"dropped/{number}"], reason)
    for state, controller in lives.controllers.items():
        controller.resume(saved[f"consumed/{state.value}"])
    return lives


def write_lives(folder: Path, lives: RowLives) -> Path:
    """Write the rows' lives, which all ranks have, for `read_lives`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_arrays(snapshot(lives), folder / LIVES)
    return folder / LIVES


def read_lives(folder: Path) -> Arrays:
    return load_arrays(folder / LIVES)


def write_columns(folder: Path, node: int, catalogue: Catalogue, rows: Integers, warehouse: Warehouse) -> Path:
    """Write a node's columns into its file, except prompts, which the next job reads again."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, having in _columns_of(catalogue, rows):
        batch = warehouse.get(having, [name])
        tensors |= {f"{name}/rows": batch.rows.clone()} | column_tensors(batch)
    path = folder / f"node_{node:04d}.safetensors"
    save_file(tensors, path)
    return path


def read_columns(folder: Path, catalogue: Catalogue, rows: Integers) -> Iterator[Batch]:
    """Read these rows from all nodes' files, in batches of one column each.

    Raises ValueError at the end if a row lacks a column that the catalogue has.
    """
    missing = dict(_columns_of(catalogue, rows))
    for path in sorted(folder.glob(_NODE_FILES)):
        with safe_open(path, framework="pt") as file:
            for name in sorted(key.removesuffix("/rows") for key in file.keys() if key.endswith("/rows")):
                batch = Batch(file.get_tensor(f"{name}/rows"))
                read_column(batch, file, name)
                here = np.flatnonzero(np.isin(batch.rows.numpy(), rows))
                if here.size:
                    batch = batch.select(torch.from_numpy(here))
                    missing[name] = np.setdiff1d(missing.get(name, ()), batch.rows.numpy())
                    yield batch
    for name, lacking in missing.items():
        if lacking.size:
            raise ValueError(f"{folder} lacks {name} of row {lacking[0]}; a node's file is missing or another")


def _columns_of(catalogue: Catalogue, rows: Integers) -> Iterator[tuple[str, Integers]]:
    """Yield the columns of these rows except prompts, each with the rows that have it."""
    columns = catalogue.columns[rows]
    for name in names_of_mask(int(np.bitwise_or.reduce(columns, initial=0))):
        if name not in PROMPT_COLUMNS:
            yield name, rows[(columns & columns_mask([name])) != 0]


def column_tensors(batch: Batch, prefix: str = "") -> dict[str, Tensor]:
    """Return the columns of a batch under their safetensors names: PREFIX + NAME/values, if ragged NAME/offsets too."""
    tensors = {}
    for name in batch.names:
        is_ragged = batch.is_ragged(name)
        tensors[f"{prefix}{name}/values"] = (batch.values(name) if is_ragged else batch.dense(name)).contiguous()
        if is_ragged:
            # Columns may share offsets, but a file may not hold shared memory.
            tensors[f"{prefix}{name}/offsets"] = batch.offsets(name).clone()
    return tensors


def read_column(batch: Batch, file: Any, path: str) -> None:
    """Put the column that `column_tensors` named PREFIX + NAME into a batch of its rows; `file` is an open file."""
    name, values = path.rpartition("/")[2], file.get_tensor(f"{path}/values")
    if f"{path}/offsets" in file.keys():
        batch.put_ragged(name, values, file.get_tensor(f"{path}/offsets"))
    else:
        batch.put_dense(name, values)
