"""Checkpoints as folders that are either complete or not there.

write aside, fsync -> manifest with a sha256 per file, fsync -> rename to step_N -> fsync of the parent
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    read_manifest,
    step_folder_name,
    step_of_folder,
    steps_in,
    sync_file,
)
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.ownership.fence import FolderTaken, check_fence, token_number
from spmdrl.resources.collectives import broadcast_bytes, gather_bytes

# As saves name what they put beside the checkpoints.
_ASIDE = re.compile(r"\.(old|forgotten|writing(_\d+)?)")
WRITE_FAILURES = (OSError, SafetensorError, MemoryError, RuntimeError)
"""What a full or failing disk raises, through Python's files, safetensors or torch."""


_WALL_TIME = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])")


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    interval: Annotated[int, Ge(0)] = 50
    """steps between checkpoints; 0: only after the last step"""
    keep_last: Annotated[int, Ge(1)] = 2
    """number of newest checkpoints that are kept"""
    asynchronous: bool = False
    """whether threads write checkpoints while training goes on, from copies in the host's memory; a job that dies
    meanwhile goes on from the checkpoint before"""
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
    save_by: str | None = None
    """time after its start by which a job saves and leaves with exit code 75, so that the same command goes on:
    HH:MM:SS or D-HH:MM:SS; null: two minutes before Slurm's time limit, where there is one"""
    best_mode: Literal["max", "min"] = "max"
    """whether higher (max) or lower (min) values of the metric in `best` are better"""

    def __post_init__(self) -> None:
        if self.save_by is not None and _WALL_TIME.fullmatch(self.save_by) is None:
            raise ValueError(
                f"checkpoint.save_by is {self.save_by!r}, but must be HH:MM:SS or D-HH:MM:SS, such as 11:50:00"
            )
        if self.model_only and self.keep_rollouts:
            raise ValueError(
                "checkpoint.model_only and checkpoint.keep_rollouts are both true, but rollouts are kept for a "
                "run that resumes, which needs the trainer's state; set one of them to false"
            )

    @property
    def save_by_seconds(self) -> float | None:
        """`save_by` in seconds."""
        found = None if self.save_by is None else _WALL_TIME.fullmatch(self.save_by)
        if found is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

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

    def to_json(self) -> str:
        return json.dumps([self.folder and str(self.folder), self.num_bytes, self.error])

    @classmethod
    def from_json(cls, text: str | bytes) -> SaveResult:
        folder, num_bytes, error = json.loads(text)
        return cls(folder and Path(folder), num_bytes, error)


@dataclass(frozen=True)
class Written:
    """What one rank wrote of a checkpoint, or the reason why it could not."""

    files: Mapping[str, FileEntry]
    error: str | None = None

    def to_json(self) -> str:
        return json.dumps([{name: asdict(entry) for name, entry in self.files.items()}, self.error])

    @classmethod
    def from_json(cls, text: str | bytes) -> Written:
        files, error = json.loads(text)
        return cls({name: FileEntry(**entry) for name, entry in files.items()}, error)


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
        Raises FolderTaken on the ranks of a job that has lost the run's folder.
        """
        aside, error = self.begin(step)
        if error is not None:
            return SaveResult(None, error=error)
        own = self.describe(aside, lambda: write(aside))
        reports = [Written.from_json(report) for report in gather_bytes(own.to_json().encode())]
        result = self.publish(step, aside, reports).to_json().encode() if self.is_main else None
        return SaveResult.from_json(broadcast_bytes(result))

    def begin(self, step: int) -> tuple[Path, str | None]:
        """Make the folder that a checkpoint is written into; on every rank, that folder, or why there is none.

        Collective. Raises FolderTaken on the ranks of a job that has lost the run's folder.
        """
        check_fence()
        # No two jobs write into the same folder, whatever became of their locks.
        aside = self.root / f".writing_{token_number()}_{step_folder_name(step)}"
        error = ""
        if self.is_main:
            try:
                _make_anew(aside)
            except WRITE_FAILURES as failure:
                error = text_of(failure)
                shutil.rmtree(aside, ignore_errors=True)
        return aside, broadcast_bytes(error.encode() if self.is_main else None).decode() or None

    def describe(self, aside: Path, write: Callable[[], Iterable[Path]]) -> Written:
        """Write this rank's files into the folder, and force them to the disk."""
        try:
            return Written({path.relative_to(aside).as_posix(): describe_file(path) for path in write()})
        except WRITE_FAILURES as failure:
            return Written({}, text_of(failure))

    def publish(self, step: int, aside: Path, reports: Sequence[Written]) -> SaveResult:
        """On the main rank, give the checkpoint its name once every rank has written; else remove what there is.

        Raises FolderTaken where the run's folder was lost.
        """
        error = next((report.error for report in reports if report.error is not None), None)
        files = {name: entry for report in reports for name, entry in report.files.items()}
        if error is None:
            try:
                self._publish(aside, Manifest(step, files, token_number()))
                return SaveResult(self.folder_of(step), sum(entry.bytes for entry in files.values()))
            except WRITE_FAILURES as failure:
                error = text_of(failure)
        shutil.rmtree(aside, ignore_errors=True)
        return SaveResult(None, error=error)

    def remove_leftovers(self) -> None:
        """Delete what a killed save left half-written, on the main rank."""
        if not self.is_main:
            return
        for aside in self.root.glob(".*step_*"):
            prefix, _, step = aside.name.rpartition("_step_")
            # Only names that a save makes are removed.
            if not _ASIDE.fullmatch(prefix) or step_of_folder(f"step_{step}") is None:
                continue
            # Killed between two renames, a save leaves the folder that it was to replace.
            target = self.root / f"step_{step}"
            if prefix == ".old" and not target.exists():
                os.rename(aside, target)
            else:
                shutil.rmtree(aside, ignore_errors=True)

    def _publish(self, aside: Path, manifest: Manifest) -> None:
        path = aside / MANIFEST
        faultpoint("checkpoint.write")
        path.write_text(manifest.to_json())
        sync_file(path)
        for folder in {path.parent for path in aside.rglob("*")}:
            sync_file(folder)
        target, old = self.folder_of(manifest.step), self.root / f".old_{step_folder_name(manifest.step)}"
        check_fence()
        shutil.rmtree(old, ignore_errors=True)
        with suppress(FileNotFoundError):
            _rename(target, old)
            _refuse_newer(old, target, manifest.token)
        try:
            # Refused by the kernel where another job has published this step meanwhile.
            _rename(aside, target)
        except OSError:
            with suppress(OSError):
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
                    check_fence()
                    _rename(self.folder_of(step), aside)
                    shutil.rmtree(aside)

    def steps(self) -> list[int]:
        """Steps that have a finished folder, oldest first."""
        return steps_in(self.root)


def _rename(source: Path, target: Path) -> None:
    faultpoint("checkpoint.rename")
    os.rename(source, target)
    faultpoint("checkpoint.rename")


def _refuse_newer(moved: Path, target: Path, token: int) -> None:
    """Put back a folder that was to be replaced, and raise FolderTaken, where a newer job has written it.

    Looked at once it has been moved, since it could change before.
    """
    try:
        newer = read_manifest(moved).token
    except (OSError, ValueError):
        # Damaged, so that the run went on from before it.
        return
    if newer > token:
        os.rename(moved, target)
        raise FolderTaken(f"{target} was written by a newer job, with the token {newer}; this job has {token} and ends")


def _make_anew(folder: Path) -> None:
    faultpoint("checkpoint.write")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def text_of(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
