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

import torch
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
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.collectives import broadcast_bytes, gather_bytes
from spmdrl.runtime.supervision.fence import FolderTaken, check_fence, token_number

# Names of the folders that saves use beside the checkpoints.
_ASIDE = re.compile(r"\.(old|forgotten|writing(_\d+)?)")
WRITE_FAILURES = (OSError, SafetensorError, MemoryError, RuntimeError)
"""Exceptions of Python's files, safetensors or torch for a full or failing disk."""


def model_dtype(checkpoint: CheckpointConfig, computed: torch.dtype) -> torch.dtype:
    """Return the dtype of checkpointed weights for a run that computes in this one."""
    if checkpoint.dtype == "auto":
        return computed
    return torch.float32 if checkpoint.dtype == "float32" else torch.bfloat16


@dataclass(frozen=True)
class SaveResult:
    """Result of a save: the folder, or None with the reason."""

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
    """One rank's files of a checkpoint, or the reason why they could not be written."""

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
        """`required` are the files that every sound checkpoint has."""
        self.root = root
        self.config = config
        self.is_main = is_main
        self.required = required

    def folder_of(self, step: int) -> Path:
        return self.root / step_folder_name(step)

    def save(self, step: int, write: Callable[[Path], Iterable[Path]]) -> SaveResult:
        """Write one checkpoint. Collective: every rank calls it with the function that writes its own files.

        `write(folder)` returns the paths that this rank wrote below `folder`. If it fails for lack of space on any
        rank, nothing is left behind, and the result has the reason. Earlier checkpoints stay until `forget_old`. Raises
        FolderTaken on the ranks of a job that has lost the run's folder.
        """
        aside, error = self.begin(step)
        if error is not None:
            return SaveResult(None, error=error)
        own = self.describe(aside, lambda: write(aside))
        reports = [Written.from_json(report) for report in gather_bytes(own.to_json().encode())]
        result = self.publish(step, aside, reports).to_json().encode() if self.is_main else None
        return SaveResult.from_json(broadcast_bytes(result))

    def begin(self, step: int) -> tuple[Path, str | None]:
        """Make the folder that a checkpoint is written into; returns it on every rank, or the reason for failing.

        Collective. Raises FolderTaken on the ranks of a job that has lost the run's folder.
        """
        check_fence()
        # No two jobs write into the same folder, whatever happened to their locks.
        aside = self.root / f".writing_{token_number()}_{step_folder_name(step)}"
        error = ""
        if self.is_main:
            try:
                faultpoint("checkpoint.write")
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
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
        """On the main rank, rename the checkpoint to its name if every rank has written, else remove its files.

        Raises FolderTaken if the run's folder was lost.
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
        """Delete, on the main rank, half-written folders of killed saves."""
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
            # Refused by the kernel if another job has published this step meanwhile.
            _rename(aside, target)
        except OSError:
            with suppress(OSError):
                os.rename(old, target)
            raise
        sync_file(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def forget_old(self, newest: int, *, kept: Collection[int] = ()) -> None:
        """Delete, on the main rank, checkpoints that neither `kept` nor the config keeps now that `newest` is there."""
        steps = [step for step in self.steps() if step <= newest] if self.is_main else []
        every = self.config.keep_every
        for step in steps[: -self.config.keep_last]:
            if step not in kept and not (every and step % every == 0):
                # A job that is killed during deletion leaves no half of a checkpoint under its name.
                aside = self.root / f".forgotten_{step_folder_name(step)}"
                with suppress(OSError):
                    check_fence()
                    _rename(self.folder_of(step), aside)
                    shutil.rmtree(aside)

    def steps(self) -> list[int]:
        """Return the steps that have a finished folder, oldest first."""
        return steps_in(self.root)


def _rename(source: Path, target: Path) -> None:
    faultpoint("checkpoint.rename")
    os.rename(source, target)
    faultpoint("checkpoint.rename")


def _refuse_newer(moved: Path, target: Path, token: int) -> None:
    """Put back a replaced folder, and raise FolderTaken, if a newer job has written it.

    Checked after moving it, since it could change before.
    """
    try:
        newer = read_manifest(moved).token
    except (OSError, ValueError):
        # Damaged, so the run resumed from an earlier one.
        return
    if newer > token:
        os.rename(moved, target)
        raise FolderTaken(f"{target} was written by a newer job, with the token {newer}; this job has {token} and ends")


def text_of(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
