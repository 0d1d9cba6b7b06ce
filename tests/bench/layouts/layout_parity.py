"""A few optimizer steps under an update layout, and how far they are from those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.training.sharded_model import Shard
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.resources.device import Device
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import UpdateMesh, build_update_mesh
from spmdrl.resources.world import World
from tests.bench.layouts.layout_cases import (
    NUM_STEPS,
    OPTIM,
    TOKENS_PER_MICROBATCH,
    LayoutCase,
    UnevenWeights,
    make_rows,
    token_mean_loss,
)
from tests.bench.layouts.traffic import Traffic, axes_of_groups, with_own_groups


@dataclass(frozen=True)
class LayoutErrors:
    """Largest relative differences from one process, and what was sent; of one rank, or of all.

    That of a tensor is the largest absolute difference of an element over the largest absolute reference value.
    """

    loss_error: float
    """of the losses of all steps"""
    gradient_error: float
    """of the gradients of all steps, before clipping, in every copy that ranks hold"""
    weight_error: float
    """of the weights after the last step, in every copy; clipping puts the norm of the whole gradient into them"""
    bytes: dict[str, int]
    """sent in the last step, by axis"""

    def __or__(self, other: LayoutErrors) -> LayoutErrors:
        """Both together."""
        return LayoutErrors(
            max(self.loss_error, other.loss_error),
            max(self.gradient_error, other.gradient_error),
            max(self.weight_error, other.weight_error),
            {axis: self.bytes.get(axis, 0) + other.bytes.get(axis, 0) for axis in {**self.bytes, **other.bytes}},
        )


def write_references(world: World, cases: Sequence[LayoutCase], folder: Path) -> None:
    """Train the model of each case on this rank alone, and write its reference."""
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), 1), world.device, world.rank)
    for case in cases:
        _write_reference(case.config, mesh, world.device, case.reference_path(folder))


def compare_cases(world: World, meshes: Sequence[Sequence[LayoutCase]], folder: Path) -> list[LayoutErrors]:
    """What this rank finds of each case, given by meshes. Collective over all ranks."""
    found = []
    for cases in meshes:
        mesh = with_own_groups(build_update_mesh(cases[0].layout, world.device, world.rank))
        for case in cases:
            try:
                own_mesh = replace(mesh, layout=case.layout)
                found.append(_compare(case.config, own_mesh, world.device, case.reference_path(folder)))
            except Exception as error:
                raise RuntimeError(f"{case.model} failed under {case.layout}: {error}") from error
    return found


def _write_reference(config: DecoderConfig, mesh: UpdateMesh, device: Device, path: Path) -> None:
    """Write losses, gradients as `{step}/{name}`, and weights."""
    engine = _engine(config, mesh, device)
    tensors: dict[str, Tensor] = {}

    def keep(step: int, gradients: Mapping[str, Shard]) -> None:
        tensors.update({f"{step}/{weight}": shard.tensor.clone() for weight, shard in gradients.items()})

    losses = _train(engine, keep)
    tensors |= {weight: shard.tensor.clone() for weight, shard in engine.named_shards().items()}
    save_file({**tensors, "losses": torch.tensor(losses, dtype=torch.float64)}, path)


def _compare(config: DecoderConfig, mesh: UpdateMesh, device: Device, reference_path: Path) -> LayoutErrors:
    reference = load_file(reference_path)
    engine = _engine(config, mesh, device)
    gradient_errors: list[float] = []

    def compare_gradients(step: int, gradients: Mapping[str, Shard]) -> None:
        for weight, _ in engine.model.named_parameters():
            gradient_errors.append(_difference(gradients[weight], reference[f"{step}/{weight}"]))

    traffic = Traffic(axes_of_groups(mesh))
    losses = torch.tensor(_train(engine, compare_gradients, last_step=traffic), dtype=torch.float64)
    return LayoutErrors(
        _largest((losses - reference["losses"]) / reference["losses"]),
        max(gradient_errors),
        max(_difference(shard, reference[weight]) for weight, shard in engine.named_shards().items()),
        dict(traffic.bytes),
    )


def _engine(config: DecoderConfig, mesh: UpdateMesh, device: Device) -> TrainingEngine:
    training = TrainingConfig(max_tokens_per_microbatch=TOKENS_PER_MICROBATCH)
    engine = TrainingEngine(config, training, OPTIM, mesh, device, compute_dtype=torch.float32)
    engine.load(UnevenWeights(config))
    return engine


def _train(
    engine: TrainingEngine,
    visit: Callable[[int, Mapping[str, Shard]], None],
    *,
    last_step: AbstractContextManager | None = None,
) -> list[float]:
    """Make the steps, call `visit` with the gradients of each, and return the losses. Collective over the mesh."""
    rows = make_rows(engine.config.vocab_size)
    mine = rows.select(range(engine.mesh.data.rank, len(rows), engine.mesh.data.size))
    losses = []
    for step in range(NUM_STEPS):
        with (step + 1 == NUM_STEPS and last_step) or nullcontext():
            accumulated = engine.accumulate(mine, token_mean_loss)
            visit(step, engine.model.named_gradients())
            losses.append(engine.step(accumulated).loss)
        engine.drop_gradients()
    return losses


def _difference(shard: Shard, reference: Tensor) -> float:
    """The largest absolute difference of the elements held over the largest absolute reference value, held or not."""
    expected = reference[shard.slice.index_within(whole_slice(shard.slice.name, tuple(reference.shape)))]
    if expected.numel() == 0:
        return 0.0
    difference = _largest(shard.tensor - expected)
    return difference / _largest(reference) if difference else 0.0


def _largest(values: Tensor) -> float:
    """The largest absolute value; NaN counts as infinite."""
    return float(values.abs().nan_to_num(nan=math.inf).max())
