"""Kernels in Triton without a GPU: interpreted in a process of their own, or compiled for Hopper and never loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


class Interpreter:
    """A process that has Triton interpret kernels on the CPU."""

    def __init__(self, process: ProcessPoolExecutor):
        self._process = process

    def run(self, function: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
        """The function's results there for each call's arguments."""
        return [self._process.submit(function, *arguments).result(timeout=120) for arguments in calls]


def compiled_size(function: Any, kinds: Mapping[str, str], constants: Mapping[str, Any]) -> int:
    """Bytes of a kernel's machine code for sm_90; arguments of no kind are 32-bit integers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    used = {name: value for name, value in constants.items() if name in names}
    built = triton.compile(ASTSource(function, signature, used), target=GPUTarget("cuda", 90, 32))
    return len(built.asm["cubin"])
