"""A training engine's state in checkpoints, in files that any other shard layout can read.

Each rank writes its own shards; a reader picks the pieces that overlap its slice from whichever files hold them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.engines.training.sharded_model import Shard
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WeightSlice
from spmdrl.observability.fault_points import faultpoint
from spmdrl.runtime.supervision.activity import activity

STEP = WeightSlice("step", (), ())
"""The optimizer's step count, a scalar."""

_SHARDS = "shards_*.safetensors"


def trainer_state(engine: TrainingEngine) -> dict[str, Shard]:
    """Return master weights, the optimizer's means and step count, under `kind/name`: the storage itself, not copies.

    With adapters, frozen weights are left out: they come from the run's initial model. Over all ranks each slice is in
    exactly one rank's state, that of its first copy.
    """
    engine.check_weights_present("save the trainer's state")
    state: dict[str, Shard] = {}
    means = engine.optimizer_state()
    for name, shard in engine.named_shards().items():
        if engine.config.updates(name) and shard.is_first and shard.slice.num_elements:
            state[f"weight/{name}"] = shard
            for kind, tensor in means.get(name, {}).items():
                state[f"{kind}/{name}"] = Shard(tensor, shard.slice, shard.global_shape)
    if engine.mesh.rank == 0:
        state[_key("step", STEP)] = Shard(torch.tensor(engine.update_count), STEP, ())
    return state


def load_trainer_state(engine: TrainingEngine, files: ShardFiles) -> None:
    """Fill weights, the optimizer's means and step count from files of any layout.

    Raises ValueError, before changing anything, if the files are of another model.
    """
    engine.check_weights_present("load the trainer's state")
    shapes = parameter_shapes(engine.config)
    files.check_model({name: shape for name, shape in shapes.items() if engine.config.updates(name)})
    means = engine.optimizer_state()
    for name, shard in engine.named_shards().items():
        if engine.config.updates(name) and shard.slice.num_elements:
            shard.tensor.copy_(files.read("weight", shard.slice))
            for kind, tensor in means.get(name, {}).items():
                tensor.copy_(files.read(kind, shard.slice))
            activity.advance("weights read")
    if engine.updater is not None:
        engine.updater.set_step_count(int(files.read("step", STEP)))


def write_shards(folder: Path, rank: int, shards: Mapping[str, Shard]) -> Path:
    """Write one rank's shards to its file in `folder`, and return the file's path; nothing is synced to disk yet.

    The slices are in the file's own header, so that tensors and index can't be separated.
    """
    path = folder / f"shards_{rank:05d}.safetensors"
    slices = {key: [shard.slice.starts, shard.slice.stops] for key, shard in shards.items()}
    tensors = {key: shard.tensor.contiguous() for key, shard in shards.items()}
    faultpoint("checkpoint.write")
    save_file(tensors, path, metadata={"slices": json.dumps(slices)})
    return path


class ShardFiles:
    """Shards that all ranks wrote into one folder, read by slices."""

    def __init__(self, folder: Path):
        """Open every rank's file and read its index. Raises ValueError if files are missing or damaged."""
        self.folder = folder
        self._pieces: dict[str, list[tuple[Any, WeightSlice]]] = {}
        paths = sorted(folder.glob(_SHARDS))
        if not paths:
            raise ValueError(f"{folder} holds no {_SHARDS}; point to the trainer folder of a checkpoint")
        for path in paths:
            try:
                self._add_file(path)
            except (OSError, SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"{path} is not a whole file of shards ({error}); use another checkpoint") from error
        self._shapes = {key: self._whole_shape(key) for key in self._pieces}

    def _add_file(self, path: Path) -> None:
        file = safe_open(path, framework="pt")
        for key, (starts, stops) in dict(json.loads(file.metadata()["slices"])).items():
            piece = WeightSlice(key.partition("/")[2], tuple(starts), tuple(stops))
            shape = tuple(file.get_slice(key).get_shape())
            if len(starts) != len(stops) or piece.shape != shape or min(starts, default=0) < 0:
                raise ValueError(f"{key} has shape {shape}, but its slice reaches from {starts} to {stops}")
            self._pieces.setdefault(key, []).append((file, piece))

    def _whole_shape(self, key: str) -> tuple[int, ...]:
        """Return the shape that the pieces tile; raises ValueError for missing or duplicate elements."""
        pieces = [piece for _, piece in self._pieces[key]]
        shape = tuple(max(stops) for stops in zip(*(piece.stops for piece in pieces), strict=True))
        num_found = sum(piece.num_elements for piece in pieces)
        if num_found != math.prod(shape):
            raise ValueError(
                f"{self.folder} holds {num_found} elements of {key}, whose shape {shape} has {math.prod(shape)}; a "
                "rank's file is missing, or is of another checkpoint"
            )
        return shape

    def check_model(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless the weights are exactly those of a model with these shapes by name.

        The optimizer's means are compared if present; the trained parameters decide which are needed.
        """
        stored = {key.partition("/")[2] for key in self._shapes if key.startswith("weight/")}
        if differing := sorted(stored ^ set(shapes)):
            where = "the model" if differing[0] in shapes else "the checkpoint"
            raise ValueError(
                f"{self.folder} is of another model: {len(differing)} weights differ, {differing[0]} is only in {where}"
            )
        for key, shape in self._shapes.items():
            kind, _, name = key.partition("/")
            if kind != STEP.name and shapes.get(name) != shape:
                raise ValueError(
                    f"{self.folder} is of another model: {key} has shape {shape} there and {shapes.get(name)} here"
                )

    def read(self, kind: str, wanted: WeightSlice) -> Tensor:
        """Assemble one slice from the pieces that overlap it. Raises ValueError if pieces are missing."""
        key = _key(kind, wanted)
        out: Tensor | None = None
        num_found = 0
        for file, piece in self._pieces.get(key, []):
            common = piece.intersect(wanted)
            if common is None:
                continue
            index = common.index_within(piece)
            # Scalars have no slices.
            values = file.get_slice(key)[index] if index else file.get_tensor(key)
            if out is None:
                out = torch.empty(wanted.shape, dtype=values.dtype)
            out[common.index_within(wanted)] = values
            num_found += common.num_elements
        if out is None or num_found != wanted.num_elements:
            raise ValueError(
                f"{self.folder} holds {num_found} of the {wanted.num_elements} elements of {key} "
                f"{list(wanted.starts)}..{list(wanted.stops)}; a rank's file is missing, or the model is another"
            )
        return out


def _key(kind: str, wanted: WeightSlice) -> str:
    return f"{kind}/{wanted.name}"
