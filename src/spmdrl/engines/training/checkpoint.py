"""Checkpoints as folders that are either complete or not there.

write aside, fsync -> manifest with a sha256 a file, fsync -> rename to step_N -> fsync of the parent
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from spmdrl.resources.collectives import barrier, broadcast_bytes, gather_bytes

MANIFEST = "manifest.json"
READ_BYTES = 1 << 22


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    interval: int = 50
    """optimizer steps between checkpoints; 0 writes only the last one"""
    keep_last: int = 2
    """how many of the newest are kept"""
    keep_every: int | None = None
    """checkpoints whose step is a multiple of this are kept for good; null keeps none"""
    keep_rollouts: bool = False
    """keep a step's rewarded rollouts, so that a job that dies in its update, after a checkpoint, has them again"""

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"checkpoint.interval is {self.interval}, but it counts steps; 0 writes only the last one")
        if self.keep_last < 1:
            raise ValueError(f"checkpoint.keep_last is {self.keep_last}, but at least 1 must be kept to resume from")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"checkpoint.keep_every is {self.keep_every}, but must be >= 1, or null for none")


@dataclass(frozen=True)
class SaveResult:
    """What a save did: the folder, or None with the reason why there is none."""

    folder: Path | None
    num_bytes: int = 0
    error: str | None = None


class CheckpointStore:
    """The checkpoints of one run, in a folder that every rank can reach."""

    def __init__(self, root: Path, config: CheckpointConfig, *, is_main: bool):
        self.root = root
        self.config = config
        self.is_main = is_main

    def folder_of(self, step: int) -> Path:
        return self.root / f"step_{step:06d}"

    def save(self, step: int, write: Callable[[Path], Iterable[Path]]) -> SaveResult:
        """Write one checkpoint. Collective: every rank calls it with what writes its own files.

        `write(folder)` returns the paths that this rank wrote below `folder`. If it fails with OSError on any
        rank, nothing is left behind, the earlier checkpoints stay, and the result says why.
        """
        aside = self.root / f".writing_step_{step:06d}"
        if self.is_main:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        barrier()
        entries: dict[str, dict[str, object]] = {}
        error = None
        try:
            for path in write(aside):
                entries[path.relative_to(aside).as_posix()] = _describe(path)
        except OSError as failure:
            error = f"{type(failure).__name__}: {failure}"
        reports = [json.loads(report) for report in gather_bytes(json.dumps([entries, error]).encode())]
        errors = [report[1] for report in reports if report[1]]
        if not errors:
            files = {name: entry for report in reports for name, entry in report[0].items()}
            errors = self._finish_on_main(step, aside, files)
        if errors:
            if self.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            return SaveResult(None, error=errors[0])
        num_bytes = sum(entry["bytes"] for report in reports for entry in report[0].values())
        return SaveResult(self.folder_of(step), num_bytes)

    def _finish_on_main(self, step: int, aside: Path, files: dict[str, dict[str, object]]) -> list[str]:
        """Publish the folder from the main rank, and tell every rank whether it worked. Collective."""
        error = ""
        if self.is_main:
            try:
                self._publish(step, aside, files)
                self._forget_old(step)
            except OSError as failure:
                error = f"{type(failure).__name__}: {failure}"
        told = broadcast_bytes(error.encode() if self.is_main else None).decode()
        return [told] if told else []

    def _publish(self, step: int, aside: Path, files: dict[str, dict[str, object]]) -> None:
        manifest = aside / MANIFEST
        manifest.write_text(json.dumps({"step": step, "files": dict(sorted(files.items()))}, indent=1))
        sync_file(manifest)
        for folder in {path.parent for path in aside.rglob("*")}:
            sync_file(folder)
        target = self.folder_of(step)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(aside, target)
        sync_file(self.root)

    def _forget_old(self, newest: int) -> None:
        steps = [step for step in self.steps() if step <= newest]
        every = self.config.keep_every
        for step in steps[: -self.config.keep_last]:
            if not (every and step % every == 0):
                shutil.rmtree(self.folder_of(step), ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps that have a finished folder, oldest first."""
        if not self.root.is_dir():
            return []
        names = [path.parent.name for path in self.root.glob(f"step_*/{MANIFEST}")]
        return sorted(int(name.removeprefix("step_")) for name in names if name.removeprefix("step_").isdigit())

    def damage_of(self, folder: Path) -> str | None:
        """What the main rank finds wrong with a checkpoint folder, on every rank; None if it is sound. Collective."""
        found = (damage(folder) or "").encode() if self.is_main else None
        return broadcast_bytes(found).decode() or None

    def newest_sound(self) -> tuple[int | None, list[str]]:
        """The newest step whose files match their manifest, and what was wrong with newer ones. Collective."""
        found: dict[str, object] = {}
        if self.is_main:
            complaints = []
            chosen = None
            for step in reversed(self.steps()):
                problem = damage(self.folder_of(step))
                if problem is None:
                    chosen = step
                    break
                complaints.append(f"{self.folder_of(step)}: {problem}")
            found = {"step": chosen, "complaints": complaints}
        found = json.loads(broadcast_bytes(json.dumps(found).encode() if self.is_main else None))
        return found["step"], found["complaints"]


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None if every file is there and unchanged."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as failure:
        return f"its {MANIFEST} can't be read ({failure})"
    for name, entry in files.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"its {MANIFEST} names {name!r}, which lies outside the folder"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if sha256_of(path) != entry["sha256"]:
            return f"{name} was changed: its sha256 is not the one in {MANIFEST}"
    return None


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sync_file(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(path: Path) -> dict[str, object]:
    sync_file(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
