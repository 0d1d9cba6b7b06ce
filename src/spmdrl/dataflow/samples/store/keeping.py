"""A batch's contents on disk: the replicated metadata of its rows, and each node's payload; read back on any nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from spmdrl.dataflow.samples.control.saved_lives import Arrays
from spmdrl.types import Batch, Integers

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
        tensors[f"{name}/rows"] = batch.rows
        if batch.is_ragged(name):
            tensors[f"{name}/offsets"] = batch.offsets(name).contiguous()
            tensors[f"{name}/values"] = batch.values(name).contiguous()
        else:
            tensors[f"{name}/values"] = batch.dense(name).contiguous()
    path = folder / f"node_{node:04d}.safetensors"
    save_file(tensors, path)
    return path


def read_columns(folder: Path, rows: Integers) -> Iterator[Batch]:
    """What all nodes wrote of these rows, in batches of one column each."""
    for path in sorted(folder.glob(_NODE_FILES)):
        tensors = load_file(path)
        for key in sorted(key for key in tensors if key.endswith("/rows")):
            name = key.removesuffix("/rows")
            batch = Batch(tensors[key])
            if f"{name}/offsets" in tensors:
                batch.put_ragged(name, tensors[f"{name}/values"], tensors[f"{name}/offsets"])
            else:
                batch.put_dense(name, tensors[f"{name}/values"])
            here = np.flatnonzero(np.isin(batch.rows.numpy(), rows))
            if here.size:
                yield batch.select(torch.from_numpy(here))
