"""The library of cpu_kernels.cpp, built in a second by the machine's C++ compiler and kept for later processes.

It lies in the user's cache folder, under a name that follows from the source, the compiler and the processor. A machine
without a compiler has none, and runs PyTorch's operations instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
_COMPILERS = ("g++", "clang++", "c++")
# None that lets a compiler leave IEEE arithmetic: it would be left in the whole process.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_BUILD_SECONDS = 120


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """The library, or None where it can't be built, which is logged where there is a compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))), None)
    if compiler is None:
        return None
    try:
        return _loaded(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning(
            "%s can't build the operations of decoding (%s), so PyTorch's are used, which take longer",
            compiler, output[0] if output else type(error).__name__,
        )  # fmt: skip
        return None


def _loaded(compiler: str) -> ctypes.CDLL:
    name = f"cpu_kernels-{_fingerprint(compiler)}.so"
    folder = _cache_folder()
    if folder is not None and (folder / name).is_file():
        return ctypes.CDLL(str(folder / name))
    with tempfile.TemporaryDirectory(prefix="spmdrl-", dir=folder) as build:
        built = Path(build) / name
        _build(compiler, built)
        if folder is None:
            return ctypes.CDLL(str(built))
        os.replace(built, folder / name)
    return ctypes.CDLL(str(folder / name))


def _build(compiler: str, target: Path) -> None:
    machine = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [compiler, *_FLAGS, machine, str(_SOURCE), "-o", str(target)]
    for threads in (["-fopenmp"], []):
        done = subprocess.run([*command, *threads], capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
        if done.returncode == 0:
            return
    raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr)


def _fingerprint(compiler: str) -> str:
    """Of all that the library depends on."""
    path = Path(compiler).resolve()
    facts = (_SOURCE.read_text(), _FLAGS, str(path), path.stat().st_mtime_ns, platform.machine(), _processor())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What the processor is and can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(next((line for line in lines if line.startswith(name)), "") for name in ("model name", "flags"))


def _cache_folder() -> Path | None:
    """The user's own folder for it, or None where there is none that nobody else can write to."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "spmdrl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    is_own = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if is_own and os.access(folder, os.W_OK) else None
