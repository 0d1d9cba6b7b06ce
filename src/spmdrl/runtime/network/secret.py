"""The job's secret: 32 random bytes in a file that only its owner may read, by which ranks recognise each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "SPMDRL_SECRET_FILE"
SECRET_BYTES = 32
JOB_FILE = ".job_secret"


def secret_file(folder: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a job's secret: a file named by the environment, else one in the run's folder.

    Without a folder it is one of this host and user, which ranks of one node share.
    """
    if named := environ.get(VARIABLE):
        return Path(named)
    return (folder or _own_folder(environ)) / JOB_FILE


def _own_folder(environ: Mapping[str, str]) -> Path:
    """Return the first of the usual folders for a user's own files that is writable."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache"
    temporary = Path(tempfile.gettempdir()) / f"spmdrl-{os.geteuid()}"
    for folder in (Path(cache) / "spmdrl", temporary):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return temporary


def read_or_make_secret(path: Path) -> bytes:
    """Read the secret, which the first rank to need it makes. Raises ValueError if others might read it."""
    try:
        if not os.path.lexists(path):
            _make(path)
        return _read(path)
    except OSError as error:
        raise ValueError(
            f"the job's secret {path} can't be read or made: {error}; name a file in a folder that all ranks share: "
            f"{VARIABLE}=/path/to/file"
        ) from error


def _make(path: Path) -> None:
    """Write the file under another name and link it, so that no rank reads half of it and the first one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, secrets.token_bytes(SECRET_BYTES))
        os.fsync(file)
        os.link(unfinished, path)
    except FileExistsError:
        pass
    finally:
        os.close(file)
        os.unlink(unfinished)


def _read(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if problem := _problem(found):
            raise ValueError(
                f"the job's secret {path} {problem}; delete it, and the next start makes a new one, or name another "
                f"file: {VARIABLE}=/path/to/file"
            )
        return os.read(file, SECRET_BYTES)
    finally:
        os.close(file)


def _problem(found: os.stat_result) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        return "isn't a plain file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, but this rank runs as user {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(found.st_mode):o}, which gives other users access; 600 is required"
    if found.st_size != SECRET_BYTES:
        return f"has {found.st_size} bytes instead of {SECRET_BYTES}"
    return None
