"""Makes the device a back end of PyTorch: in this process, and in those that it starts."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from tests.support.simulated_accelerator import compiling
from tests.support.simulated_accelerator.torch_module import DeviceModule

_OPTIONS_VARIABLE = "SIMULATED_ACCELERATOR"
_ROOT = Path(__file__).parents[3]
# Holds what an installed package would have: an entry point, which PyTorch calls while it is imported.
_AUTOLOAD_FOLDER = Path(__file__).parent / "autoload"


@dataclass(frozen=True)
class Options:
    """How the device behaves in a process."""

    name: str = "sim"
    """in PyTorch"""
    late_kernels: bool = False
    """run kernels as late as copies"""
    memory_bytes: int | None = None
    """of each device; 1 GiB if None"""


def install(name: str = "sim") -> ModuleType:
    """Register the device as `torch.<name>` in this process, and in spmdrl's tables; returns that module.

    The name stays for the life of the process. Compiles on first use.
    """
    module = _registered(name)
    _fill_tables(name)
    return module


def install_with(options: Options) -> None:
    """Install the device in this process, and have PyTorch load it in each Python process started from here on."""
    os.environ[_OPTIONS_VARIABLE] = json.dumps(asdict(options))
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    added = [str(_AUTOLOAD_FOLDER), str(_ROOT)]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in added]
    os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, *added])
    install(options.name)
    _behave(options)


def autoload() -> None:
    """Register the device as the environment wants it. PyTorch calls this at the end of its own import."""
    options = Options(**json.loads(os.environ.get(_OPTIONS_VARIABLE, "{}")))
    # A module that holds a table may be what imports torch first, and has its table only later.
    _registered(options.name).before_use = lambda: _fill_tables(options.name)
    _behave(options)


def _behave(options: Options) -> None:
    module = _registered(options.name)
    module.late_kernels(options.late_kernels)
    if options.memory_bytes is not None:
        for index in range(module.device_count()):
            module.set_memory_limit(options.memory_bytes, index)


@functools.cache
def _registered(name: str) -> DeviceModule:
    extension = compiling.load()
    torch.utils.rename_privateuse1_backend(name)
    module = DeviceModule(name, extension)
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    extension.register_hooks()
    extension.prefer_cpu_kernels()
    _register_collectives(name, extension)
    return module


def _collective_library(name: str) -> str:
    return "hccl" if name == "npu" else f"{name}ccl"


def _register_collectives(name: str, extension: ModuleType) -> None:
    library = _collective_library(name)

    def create(store: dist.Store, rank: int, size: int, timeout: object) -> dist.Backend:
        return extension.Collectives(dist.ProcessGroupGloo(store, rank, size, timeout), library)

    dist.Backend.register_backend(library, create, devices=[name])


@functools.cache
def _fill_tables(name: str) -> None:
    # Imported now: a process in which PyTorch loads the device need not be one of spmdrl.
    from tests.support.simulated_accelerator.table_rows import fill_tables

    fill_tables(name, _collective_library(name))
