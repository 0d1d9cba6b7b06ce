"""Checkpoints as folders that are either complete or not there.

write aside, fsync -> manifest with a sha256 per file, fsync -> rename to step_N -> fsync of the parent
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from safetensors import SafetensorError

from spmdrl.engines.training.checkpoints.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    describe_file,
    step_folder_name,
    steps_in,
    sync_file,
)
from spmdrl.resources.collectives import broadcast_bytes, gather_bytes

WRITE_FAILURES = (OSError, SafetensorError, MemoryError, RuntimeError)
"""What a full or failing disk raises, through Python's files, safetensors or torch."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    interval: Annotated[int, Ge(0)] = 50
    """steps between checkpoints; 0: only after the last step"""
    keep_last: Annotated[int, Ge(1)] = 2
    """number of newest checkpoints that are kept"""
    keep_every: Annotated[int, Ge(1)] | None = None
    """checkpoints whose step is a multiple of this are kept for good; null: none are"""
    keep_rollouts: bool = False
    """whether to keep a step's rewarded rollouts, so that a job that dies in its update, after a checkpoint, has them
    again"""
    model_only: bool = False
    """whether to write the model alone, without the optimizer: a fraction of the bytes, but not enough to resume
    from"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the model's weights in checkpoints; auto: that of the computation (model.dtype). Resuming doesn't depend
    on it: a trainer's own weights are kept in float32"""
    best: str | None = None
    """a metric, such as eval/accuracy or reward, whose best checkpoints are kept, the best of them linked as `best`; a
    better eval/ metric is saved even where no checkpoint is due; null: eval/reward with keep_best, else none"""
    keep_best: Annotated[int, Ge(1)] | None = None
    """number of checkpoints with the best values of `best` that are kept beside the newest; null: 1 where `best` is
    set, else 0"""
    best_mode: Literal["max", "min"] = "max"
    """whether higher (max) or lower (min) values of the metric in `best` are better"""

    def __post_init__(self) -> None:
        if self.model_only and self.keep_rollouts:
            raise ValueError(
                "checkpoint.model_only and checkpoint.keep_rollouts are both true, but rollouts are kept for a "
                "run that resumes, which needs the trainer's state; set one of them to false"
            )

    @property
    def best_metric(self) -> str | None:
        """The metric by which checkpoints are the best; None where none is kept for one."""
        return self.best or (None if self.keep_best is None else "eval/reward")

    @property
    def num_best(self) -> int:
        """Checkpoints that are kept for their values."""
        return self.keep_best or (0 if self.best is None else 1)

    def model_dtype(self, computed: torch.dtype) -> torch.dtype:
        """The dtype of the model's weights in checkpoints of a run that computes in this one."""
        if self.dtype == "auto":
            return computed
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


@dataclass(frozen=True)
class SaveResult:
    """What a save did: the folder, or None with the reason why there is none."""

    folder: Path | None
    num_bytes: int = 0
    error: str | None = None


class CheckpointStore:
    """The checkpoints of one run, in a folder that every rank can reach."""

    def __init__(self, root: Path, config: CheckpointConfig, *, is_main: bool, required: Collection[str] = ()):
        """`required` are the files that every sound checkpoint holds."""
        self.root = root
        self.config = config
        self.is_main = is_main
        self.required = required

    def folder_of(self, step: int) -> Path:
        return self.root / step_folder_name(step)

    def save(self, step: int, write: Callable[[Path], Iterable[Path]]) -> SaveResult:
        """Write one checkpoint. Collective: every rank calls it with what writes its own files.

        `write(folder)` returns the paths that this rank wrote below `folder`. If it fails for want of space on any
        rank, nothing is left behind, and the result has the reason. The earlier checkpoints stay until `forget_old`.
        """
        aside = self.root / f".writing_{step_folder_name(step)}"
        entries: dict[str, FileEntry] = {}
        error = self._on_main(lambda: _make_anew(aside))
        if error is None:
            try:
                entries = {path.relative_to(aside).as_posix(): describe_file(path) for path in write(aside)}
            except WRITE_FAILURES as failure:
                error = _text_of(failure)
            own = json.dumps([{name: asdict(entry) for name, entry in entries.items()}, error])
            reports = [json.loads(report) for report in gather_bytes(own.encode())]
            error = next((report[1] for report in reports if report[1]), None)
            entries = {name: FileEntry(**entry) for report in reports for name, entry in report[0].items()}
        if error is None:
            error = self._on_main(lambda: self._publish(aside, Manifest(step, entries)))
        if error is not None:
            if self.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            return SaveResult(None, error=error)
        return SaveResult(self.folder_of(step), sum(entry.bytes for entry in entries.values()))

    def remove_leftovers(self) -> None:
        """Delete what a killed save left half-written, on the main rank."""
        if not self.is_main:
            return
        for old in self.root.glob(".old_step_*"):
            # Killed between two renames, a save leaves the folder that it was to replace.
            target = self.root / old.name.removeprefix(".old_")
            if not target.exists():
                os.rename(old, target)
        for aside in self.root.glob(".*step_*"):
            shutil.rmtree(aside, ignore_errors=True)

    def _on_main(self, action: Callable[[], None]) -> str | None:
        """Do something on the main rank; why it failed, on every rank. Collective."""
        error = ""
        if self.is_main:
            try:
                action()
            except WRITE_FAILURES as failure:
                error = _text_of(failure)
        return broadcast_bytes(error.encode() if self.is_main else None).decode() or None

    def _publish(self, aside: Path, manifest: Manifest) -> None:
        path = aside / MANIFEST
        path.write_text(manifest.to_json())
        sync_file(path)
        for folder in {path.parent for path in aside.rglob("*")}:
            sync_file(folder)
        target, old = self.folder_of(manifest.step), self.root / f".old_{step_folder_name(manifest.step)}"
        shutil.rmtree(old, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(target, old)
        try:
            os.rename(aside, target)
        except OSError:
            with suppress(FileNotFoundError):
                os.rename(old, target)
            raise
        sync_file(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def forget_old(self, newest: int, *, kept: Collection[int] = ()) -> None:
        """Delete, on the main rank, what is neither in `kept` nor kept by the config now that `newest` is there."""
        steps = [step for step in self.steps() if step <= newest] if self.is_main else []
        every = self.config.keep_every
        for step in steps[: -self.config.keep_last]:
            if step not in kept and not (every and step % every == 0):
                # A job that is killed in the middle of it leaves no half of a checkpoint under its name.
                aside = self.root / f".forgotten_{step_folder_name(step)}"
                with suppress(OSError):
                    os.rename(self.folder_of(step), aside)
                    shutil.rmtree(aside)

    def steps(self) -> list[int]:
        """Steps that have a finished folder, oldest first."""
        return steps_in(self.root)


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _text_of(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
