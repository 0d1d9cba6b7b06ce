"""A run's folder before anything is written into it: its lock, and the disk space for the run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.config import Config, RunConfig
from spmdrl.config.reader import ConfigError
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.collectives import broadcast_bytes, gather_bytes
from spmdrl.resources.world import World
from spmdrl.runtime.network.secret import JOB_FILE
from spmdrl.runtime.supervision.fence import disarm_fence
from spmdrl.runtime.supervision.holder import LOCK_FILE, FolderHeld, held

# A launcher may restart a job before the old one's processes have quite ended.
WAIT_SECONDS = 10.0
# AdamW's two means and the master weights, in float32.
_TRAINER_BYTES_PER_PARAMETER = 12


@contextmanager
def hold_run_folder(config: RunConfig, world: World, name: str) -> Iterator[None]:
    """Keep other jobs out of `run.dir` inside this block. Raises ConfigError on every rank. Collective."""
    with ExitStack() as stack:
        on_main(world, lambda: _hold(config, stack, name))
        yield


@contextmanager
def hold_folder_of_training(config: Config, world: World) -> Iterator[None]:
    """Hold the run's folder; with `resume` never, an earlier run's files are moved first, and nothing is deleted."""
    run = config.run
    with ExitStack() as stack:

        def take() -> None:
            folder, before = run.folder, ExitStack()
            with before:
                _hold(run, before, LOCK_FILE)
                if config.resume == "never" and not set(os.listdir(folder)) <= {LOCK_FILE, JOB_FILE}:
                    _move_aside(folder)
                    _hold(run, stack, LOCK_FILE)
                else:
                    stack.push(before.pop_all())

        on_main(world, take)
        yield
        # Unless an exception passes: on its way nothing may be written without checking the token.
        disarm_fence()


def on_main(world: World, action: Callable[[], Any]) -> Any:
    """Return the main rank's result, a JSON value, on every rank. Collective.

    Its ValueError and OSError, caused by input, become ConfigError on every rank.
    """
    found: dict[str, Any] = {}
    if world.is_main:
        try:
            found = {"value": action()}
        except (ValueError, OSError) as failure:
            found = {"refusal": str(failure)}
    found = json.loads(broadcast_bytes(json.dumps(found).encode() if world.is_main else None))
    if "refusal" in found:
        raise ConfigError(found["refusal"])
    return found["value"]


def on_every_rank(action: Callable[[], None]) -> None:
    """Run an action that input or disks may fail on every rank; ConfigError on all if one fails. Collective."""
    refusal = ""
    try:
        action()
    except (ValueError, OSError) as failure:
        refusal = str(failure)
    if refusals := [part.decode() for part in gather_bytes(refusal.encode()) if part]:
        raise ConfigError(refusals[0])


def _hold(config: RunConfig, stack: ExitStack, name: str) -> None:
    folder, key = config.folder, config.folder_key
    try:
        stack.enter_context(held(folder, name, wait_seconds=WAIT_SECONDS))
    except FolderHeld as failure:
        raise ConfigError(
            f"{failure}; wait for its end, stop it, or set {key} to another (if that process is gone, and the file "
            f"system has no locks, delete {folder / name})"
        ) from None
    except OSError as failure:
        raise ConfigError(
            f"{key} makes {folder} the run's folder, but it can't be written to: {failure.strerror}; set {key} to a "
            "folder that can"
        ) from failure


def _move_aside(folder: Path) -> None:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    Console().note(f"resume=never: the earlier run was moved to {aside}")


def existing_part(folder: Path) -> Path:
    """Return the folder, or the existing part of its path."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def num_parameters(decoder: DecoderConfig) -> int:
    """Count elements of all weights without adapters; a tied head counts once."""
    return sum(prod(shape) for shape in parameter_shapes(replace(decoder, lora=None)).values())


def num_trained(decoder: DecoderConfig) -> int:
    """Count elements of the trained weights: all, or those of adapters."""
    return sum(prod(shape) for name, shape in parameter_shapes(decoder).items() if decoder.updates(name))


def check_disk_space(
    config: RunConfig, store: CheckpointStore, decoders: Iterable[DecoderConfig], dtype: torch.dtype, *,
    num_steps: int, made_bytes: int = 0,
) -> int:  # fmt: skip
    """Refuse a disk without space for the checkpoints of `num_steps` more steps, each with all these models.

    Returns their bytes with the `made_bytes` of weights that come first. A checkpoint is written whole before the
    oldest is deleted, so there is one more than is kept. Raises ValueError.
    """
    checkpoint, present = store.config, len(store.steps())
    trainer_bytes = 0 if checkpoint.model_only else _TRAINER_BYTES_PER_PARAMETER
    num_bytes = sum(num_parameters(one) * dtype.itemsize + num_trained(one) * trainer_bytes for one in decoders)
    num_saves = -(-num_steps // checkpoint.interval) if checkpoint.interval else 1
    count = max(1, min(num_saves, checkpoint.keep_last + 1 + checkpoint.num_best) - present)
    folder = config.folder
    free = shutil.disk_usage(existing_part(folder)).free
    needed = count * num_bytes + made_bytes
    if needed > free:
        made = f"{made_bytes:,} bytes of random weights (model.make) and " if made_bytes else ""
        raise ValueError(
            f"the disk of {folder} has {free:,} bytes free, but {made}{count} checkpoints of {num_bytes:,} bytes need "
            f"{needed:,}; free some, lower checkpoint.keep_last, set checkpoint.model_only, or set "
            f"{config.folder_key} to a folder on another disk"
        )
    return needed
