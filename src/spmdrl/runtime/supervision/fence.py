"""A fencing token: the number of the newest job in a run's folder, which every checkpoint checks first.

A lock can be lost without its holder's knowledge: with the link to its node, or to an operator who deletes it. The next
job takes a token; then the earlier one, if it still runs, ends before its next checkpoint.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from spmdrl.runtime.supervision.holder import Holder, lock_that_was_lost

FENCE_FILE = "run.token"
FOLDER_TAKEN = 77
"""exit code of a job that lost its folder to another one; restarting it would disturb that one"""


class FolderTaken(Exception):
    """Another job has taken the folder since; this one must not write into it any more."""


@dataclass(frozen=True)
class _Fence:
    path: Path
    content: bytes
    number: int


_fence: _Fence | None = None


def take_folder(folder: Path) -> bytes:
    """Write a token whose number is one higher than the last job's; returns it, for `arm_fence` on every rank.

    Raises FolderTaken if another job has taken a lock that this process holds.
    """
    if (lock := lock_that_was_lost()) is not None:
        raise FolderTaken(f"{lock} is another job's by now; this one ends, and wrote nothing")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FENCE_FILE
    number = 1 + _number_of(_read(path))
    # Two jobs without locks may find the same number; one of them then reads the other's token.
    fields = {"number": number, **asdict(Holder.this_process()), "nonce": os.urandom(8).hex()}
    content = json.dumps(fields).encode()
    _write(path, content)
    return content


def arm_fence(folder: Path, content: bytes) -> None:
    """Make `check_fence` compare the folder's token with this one from here on."""
    global _fence
    _fence = _Fence(folder / FENCE_FILE, content, _number_of(content))


def disarm_fence() -> None:
    """End the checks, since the folder is released."""
    global _fence
    _fence = None


def token_number() -> int:
    """Return the number of this job's token; 0 without one."""
    return 0 if _fence is None else _fence.number


def check_fence() -> None:
    """Raise FolderTaken if another job has taken the folder; OSError if that can't be determined."""
    if _fence is None or (found := _read(_fence.path)) == _fence.content:
        return
    raise FolderTaken(
        f"{_fence.path.parent} was taken by {_holder_of(found)}; this job, whose token {_fence.number} no longer "
        "counts, ends and writes nothing more"
    )


def loss_of_folder(cause: str) -> str:
    """Return a failure's cause as one line if another job has the folder; else ""."""
    prefix = f"{FolderTaken.__name__}: "
    return cause.removeprefix(prefix) if cause.startswith(prefix) else ""


def _read(path: Path) -> bytes:
    """Return the content of the file; empty if it is missing."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _number_of(content: bytes) -> int:
    number = _fields_of(content).get("number")
    return number if type(number) is int and number > 0 else 0


def _holder_of(content: bytes) -> str:
    fields = _fields_of(content)
    if not fields:
        return f"nobody that can be named ({FENCE_FILE} is gone or broken)"
    return f"process {fields.get('pid')} on {fields.get('host')}, started {fields.get('started')}"


def _fields_of(content: bytes) -> dict[str, object]:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _write(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{FENCE_FILE}.{os.urandom(8).hex()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
