"""A batch's contents on disk: the replicated metadata of its rows, and each node's payload; read back on any nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.dataflow.samples.control.saved_lives import Arrays
from spmdrl.nouns.batch import Batch, Integers

LIVES = "rows.safetensors"
_NODE_FILES = "node_*.safetensors"


def write_lives(folder: Path, arrays: Arrays) -> Path:
    """Write what `snapshot` gave."""
    folder.mkdir(parents=True, exist_ok=True)
    save_arrays(arrays, folder / LIVES)
    return folder / LIVES


def read_lives(folder: Path) -> Arrays:
    return load_arrays(folder / LIVES)


def write_columns(folder: Path, node: int, columns: Iterator[Batch]) -> Path:
    """Write batches of one column each into the node's file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for batch in columns:
        (name,) = batch.names
        tensors |= {f"{name}/rows": batch.rows.clone()} | column_tensors(batch)
    path = folder / f"node_{node:04d}.safetensors"
    save_file(tensors, path)
    return path


def read_columns(folder: Path, rows: Integers) -> Iterator[Batch]:
    """What all nodes wrote of these rows, in batches of one column each."""
    for path in sorted(folder.glob(_NODE_FILES)):
        with safe_open(path, framework="pt") as file:
            for key in sorted(key for key in file.keys() if key.endswith("/rows")):
                batch = Batch(file.get_tensor(key))
                read_column(batch, file, key.removesuffix("/rows"))
                here = np.flatnonzero(np.isin(batch.rows.numpy(), rows))
                if here.size:
                    yield batch.select(torch.from_numpy(here))


def column_tensors(batch: Batch, prefix: str = "") -> dict[str, Tensor]:
    """The columns of a batch as a safetensors file names them: PREFIX + NAME/values, ragged ones NAME/offsets too."""
    tensors = {}
    for name in batch.names:
        is_ragged = batch.is_ragged(name)
        tensors[f"{prefix}{name}/values"] = (batch.values(name) if is_ragged else batch.dense(name)).contiguous()
        if is_ragged:
            # Columns may have theirs in common, and a file may hold no memory twice.
            tensors[f"{prefix}{name}/offsets"] = batch.offsets(name).clone()
    return tensors


def read_column(batch: Batch, file: Any, path: str) -> None:
    """Put the column that `column_tensors` named PREFIX + NAME into a batch of its rows; `file` is an open file."""
    name, values = path.rpartition("/")[2], file.get_tensor(f"{path}/values")
    if f"{path}/offsets" in file.keys():
        batch.put_ragged(name, values, file.get_tensor(f"{path}/offsets"))
    else:
        batch.put_dense(name, values)
