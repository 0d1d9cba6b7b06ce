"""Compiles the device's C++ once per version of it, of torch and of Python, for all processes of this user."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

_NAME = "simulated_device"
_SOURCES = Path(__file__).parent / "csrc"
# Kernels are PyTorch's own: what is compiled here only calls them, and compiles in half the time unoptimized.
_FLAGS = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={_NAME}"]


def why_not() -> str | None:
    """Why the device can't be built here; None if it can."""
    if sys.platform != "linux":
        return f"the simulated device needs Linux, not {sys.platform}"
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"the simulated device needs a C++ compiler, and there is no {compiler} (set CXX to name another)"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if headers.is_file() else f"the simulated device needs Python's headers, and {headers} isn't there"


def load() -> ModuleType:
    """The extension; see `built`."""
    spec = importlib.util.spec_from_file_location(_NAME, built())
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def built() -> Path:
    """The compiled library; the first process that needs it compiles it while the others wait.

    Raises RuntimeError with the compiler's messages if that fails.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmdrl-tests"
    library = cache / f"{_NAME}-{_version()}.so"
    if library.is_file():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                # Renamed once it is whole: a process that is killed here leaves nothing that others would load.
                _compile(Path(folder)).rename(library)
    return library


def _version() -> str:
    """Changes with whatever the compiled code depends on."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.rglob("*.*")):
        digest.update(source.name.encode() + source.read_bytes())
    parts = [torch.__version__, sys.version, cpp_extension.get_cxx_compiler(), *_FLAGS]
    digest.update("\n".join(parts).encode())
    return digest.hexdigest()[:16]


def _compile(folder: Path) -> Path:
    # As one source: what takes long is to read PyTorch's headers, which so is done once.
    whole, library = folder / f"{_NAME}.cpp", folder / f"{_NAME}.so"
    whole.write_text("".join(f'#include "{source}"\n' for source in sorted(_SOURCES.rglob("*.cpp"))))
    includes = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    command = [cpp_extension.get_cxx_compiler(), *_FLAGS, *includes, str(whole), *libraries, "-o", str(library)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"the simulated device doesn't compile: {' '.join(command)}\n{ended.stderr}")
    return library
