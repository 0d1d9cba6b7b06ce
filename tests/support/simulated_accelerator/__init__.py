"""An accelerator that needs no hardware: memory out of the host's reach, streams that run late, a check for races.

It computes with the CPU's kernels, so its results are the CPU's to the bit. docs/accelerators.md describes what it
simulates and what it can't.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
import torch.distributed as dist

from spmdrl.engines.generation.native.cache import cached_attention
from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.training.update import optimizer
from spmdrl.resources import device as devices
from tests.support.simulated_accelerator import compiling
from tests.support.simulated_accelerator.compiling import why_not
from tests.support.simulated_accelerator.torch_module import DeviceModule

__all__ = ["install", "why_not"]


def install(name: str = "sim") -> ModuleType:
    """Register the device as `torch.<name>` in this process, and in spmdrl's tables; returns that module.

    The name stays for the life of the process. Compiles on first use.
    """
    return _installed(name)


# With the default filled in: calls with and without it are one.
@functools.cache
def _installed(name: str) -> ModuleType:
    extension = compiling.load()
    torch.utils.rename_privateuse1_backend(name)
    module = DeviceModule(name, extension)
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    extension.register_hooks()
    extension.prefer_cpu_kernels()
    _register_collectives(name, extension)
    _fill_tables(name)
    return module


def _collective_library(name: str) -> str:
    return "hccl" if name == "npu" else f"{name}ccl"


def _register_collectives(name: str, extension: ModuleType) -> None:
    library = _collective_library(name)

    def create(store: dist.Store, rank: int, size: int, timeout: object) -> dist.Backend:
        return extension.Collectives(dist.ProcessGroupGloo(store, rank, size, timeout), library)

    dist.Backend.register_backend(library, create, devices=[name])


def _fill_tables(name: str) -> None:
    devices.BACKENDS[name] = f"cpu:gloo,{name}:{_collective_library(name)}"
    for functions in ops.TABLE.values():
        functions[name] = functions["cpu"]
    # Weights in blocks are oneDNN's own tensors, which no other device can hold.
    ops.TABLE["blocked_linear"][name] = plain.blocked_linear
    cached_attention.WHOLE_ROW_TILES[name] = cached_attention.WHOLE_ROW_TILES["cpu"]
    optimizer.FUSED_ADAMW += (name,)
