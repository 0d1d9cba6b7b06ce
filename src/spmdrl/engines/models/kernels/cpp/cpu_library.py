"""The library of this folder's C++ sources, built in two seconds by the machine's compiler and cached.

It is in the user's cache folder, under a name derived from source, compiler and processor. Machines without a compiler
run PyTorch's operations instead.
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
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = tuple(
    _FOLDER / name
    for name in ("paged_attention.cpp", "row_attention.cpp", "elementwise.cpp", "softmax.cpp", "delta.cpp")
)
_HEADER = _FOLDER / "cpu_vectors.h"
_COMPILERS = ("g++", "clang++", "c++")
# No option that relaxes IEEE arithmetic: it would apply to the whole process. The last one has GCC fuse products with
# their additions in all loops. For some processors, such as AMD's without AVX-512, its default leaves out those that it
# sees as one chain, and a row's bits would depend on how many rows are beside it.
_FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "--param=avoid-fma-max-bits=0",
)  # fmt: skip
_BUILD_SECONDS = 120


class RowLayout(ctypes.Structure):
    """Memory layout of an elementwise operation's rows: `num_groups` x `rows_per_group` of `size` numbers."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("num_groups", "rows_per_group", "size", "group_stride", "row_stride", "threads")
    ]


_TENSOR, _NUMBER, _LAYOUT = ctypes.c_void_p, ctypes.c_float, ctypes.POINTER(RowLayout)
# Rows, their size, and threads.
_SIZES = [ctypes.c_int64] * 3
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "rms_norm": ([_TENSOR, _TENSOR, _NUMBER, _LAYOUT, _TENSOR, _TENSOR], None),
    "rms_norm_backward": ([_TENSOR, _TENSOR, _TENSOR, _TENSOR, _LAYOUT, _TENSOR, _TENSOR], ctypes.c_bool),
    "rotate": ([_TENSOR, _TENSOR, _TENSOR, _NUMBER, _LAYOUT, _TENSOR], None),
    "swiglu": ([_TENSOR, _TENSOR, _LAYOUT, _TENSOR], None),
    "swiglu_backward": ([_TENSOR, _TENSOR, _TENSOR, _LAYOUT, _TENSOR, _TENSOR], None),
    "exponential_sums": ([_TENSOR, _TENSOR, *_SIZES, _TENSOR, _TENSOR], None),
    "minus_expected": ([_TENSOR] * 5 + _SIZES, None),
    "packed_attention": ([ctypes.c_void_p] * 6, ctypes.c_bool),
    "packed_attention_backward": ([ctypes.c_void_p] * 9, ctypes.c_bool),
    "cached_attention": ([ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_void_p], ctypes.c_bool),
    "gated_delta": ([ctypes.c_void_p] * 7, ctypes.c_bool),
    "causal_conv": ([_TENSOR, ctypes.c_int64, _TENSOR, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3], None),
}
"""Arguments and result of each function."""


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """Return the library; None, with a log message, if it can't be built."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))), None)
    if compiler is None:
        logger.warning(
            "no C++ compiler was found, so PyTorch's operations are used on this CPU, which take longer and round "
            "differently in the last bits; install g++, or name a compiler in the environment's CXX"
        )
        return None
    try:
        library = _loaded(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning(
            "%s can't build the operations of a CPU (%s), so PyTorch's are used, which take longer",
            compiler, output[0] if output else type(error).__name__,
        )  # fmt: skip
        return None
    for name, (takes, returns) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = takes, returns
    return library


def library_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """Return the library if it supports these tensors: in float32."""
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        return None
    return cpu_library()


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
    command = [compiler, *_FLAGS, machine, *map(str, _SOURCES), "-o", str(target)]
    for threads in (["-fopenmp"], []):
        done = subprocess.run([*command, *threads], capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
        if done.returncode == 0:
            return
    raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr)


def _fingerprint(compiler: str) -> str:
    """Return a digest of everything that the library depends on."""
    path = Path(compiler).resolve()
    sources = [source.read_text() for source in (*_SOURCES, _HEADER)]
    facts = (sources, _FLAGS, str(path), path.stat().st_mtime_ns, platform.machine(), _processor())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(next((line for line in lines if line.startswith(name)), "") for name in ("model name", "flags"))


def _cache_folder() -> Path | None:
    """Return the user's own folder for it, or None if others can write to every candidate."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "spmdrl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    is_own = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if is_own and os.access(folder, os.W_OK) else None
