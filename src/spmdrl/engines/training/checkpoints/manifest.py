"""List of a checkpoint's files with their sizes and digests, and the check of a folder against it.

Anything else in place of a list, from a flipped bit to a foreign file, is damage and never an exception.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from spmdrl.observability.fault_points import faultpoint
from spmdrl.runtime.supervision.activity import activity

MANIFEST = "manifest.json"
_DIGEST = "sha256_of_files"
_FENCE_KEY = "token"
_READ_BYTES = 1 << 22
_STEP_PREFIX = "step_"


@dataclass(frozen=True)
class FileEntry:
    """Expected size and digest of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Files of one checkpoint by their paths below its folder."""

    step: int
    files: Mapping[str, FileEntry]
    token: int = 0
    """number of the writing job's token; 0: none"""

    def to_json(self) -> str:
        files = {name: asdict(entry) for name, entry in sorted(self.files.items())}
        content = {"step": self.step, "files": files, _DIGEST: _digest_of(files, self.token)}
        return json.dumps(content | ({_FENCE_KEY: self.token} if self.token else {}), indent=1)


def step_folder_name(step: int) -> str:
    return f"{_STEP_PREFIX}{step:06d}"


def step_of_folder(name: str) -> int | None:
    """Return the step in a folder's name, or None for a name that no checkpoint has."""
    digits = name.removeprefix(_STEP_PREFIX)
    # Other scripts have digits too, which int() reads or refuses.
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
        return None
    return int(digits) if step_folder_name(int(digits)) == name else None


def steps_in(root: Path) -> list[int]:
    """Return the steps that have a finished folder below `root`, oldest first."""
    found = [step_of_folder(path.parent.name) for path in root.glob(f"{_STEP_PREFIX}*/{MANIFEST}")]
    return sorted(step for step in found if step is not None)


def damage(folder: Path, required: Collection[str] = (), *, below: str = "") -> str | None:
    """Describe a checkpoint folder's damage; None if all its files, with the `required` ones, are as written.

    Only files with names that begin with `below` are read.
    """
    try:
        return _damage(folder, read_manifest(folder), required, below)
    except (OSError, ValueError) as failure:
        return f"its files can't be read: {failure}"


def read_manifest(folder: Path) -> Manifest:
    """Read the list of files; raises ValueError for anything else, and for paths outside the folder."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes().decode(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"its {MANIFEST} has too many brackets") from None
    if (
        not isinstance(content, dict)
        or not _is_count(content.get("step"))
        or not isinstance(content.get("files"), dict)
    ):
        raise ValueError(f"its {MANIFEST} isn't an object with a step and files")
    if unknown := content.keys() - {"step", "files", _DIGEST, _FENCE_KEY}:
        raise ValueError(f"its {MANIFEST} has {min(unknown)!r}, which no manifest has")
    token = content.get(_FENCE_KEY, 0)
    if not _is_count(token):
        raise ValueError(f"its {MANIFEST} has {token!r} in place of a token's number")
    digest = content.get(_DIGEST)
    # Checkpoints of earlier versions have no digest of the list itself.
    if _DIGEST in content and digest != _digest_of(content["files"], token):
        raise ValueError(f"the files in its {MANIFEST} were changed: their digest is another")
    entries = {name: _entry(name, value) for name, value in content["files"].items()}
    return Manifest(content["step"], entries, token)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    activity.advance("files")
    return digest.hexdigest()


def sync_file(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    faultpoint("checkpoint.fsync")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_file(path: Path) -> FileEntry:
    """Return the entry of a file that was just written, once it is on the disk."""
    sync_file(path)
    entry = FileEntry(path.stat().st_size, sha256_of(path))
    faultpoint("checkpoint.write", path)
    return entry


def _damage(folder: Path, manifest: Manifest, required: Collection[str], below: str) -> str | None:
    step = step_of_folder(folder.name)
    if step is not None and step != manifest.step:
        return f"it holds step {manifest.step}, unlike its name"
    missing = sorted(set(required) - manifest.files.keys())
    if missing:
        return f"its {MANIFEST} doesn't list {missing[0]}"
    files = {name: entry for name, entry in manifest.files.items() if name.startswith(below)}
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.bytes:
            return f"{name} has {path.stat().st_size} bytes instead of {entry.bytes}"
        if sha256_of(path) != entry.sha256:
            return f"{name} was changed: its sha256 is not the one in {MANIFEST}"
    # Readers load every tensor file of a folder, so extra files are as wrong as missing ones.
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")}
    unlisted = {name for name in present if name.startswith(below)} - files.keys()
    return f"{min(unlisted)} is not listed in its {MANIFEST}" if unlisted else None


def _entry(name: str, value: object) -> FileEntry:
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"its {MANIFEST} names {name!r}, which lies outside the folder")
    if not isinstance(value, dict) or not _is_count(value.get("bytes")) or not isinstance(value.get("sha256"), str):
        raise ValueError(f"its {MANIFEST} has no size and sha256 of {name!r}")
    return FileEntry(value["bytes"], value["sha256"])


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _digest_of(files: Mapping[str, Any], token: int) -> str:
    # Manifests of jobs without a token keep the digest of versions before tokens.
    content = [token, files] if token else files
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key occurs twice")
    return content
