"""A CUDA device of shapes, dtypes and rules without values, beside a host of real tensors.

PyTorch's fake tensors run each operator's CUDA rules (shapes, dtypes, layouts, no mixed devices) and compute nothing.
Here only tensors of the device are fake: lengths, offsets and tables of the host keep their values, so that whole
engines run. What the device sends to the host reads as zeros, `True` and a chosen integer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GUARD_SOURCE = Path(__file__).with_name("fake_cuda.cpp")


class FakeEvent:
    """A point in a stream that is always past."""

    def __init__(self, **_: bool):
        pass

    def record(self, stream: FakeStream | None = None) -> None:
        pass

    def wait(self, stream: FakeStream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 0.0


class FakeStream:
    """A queue that nothing waits in; as a context, what `torch.cuda.stream` returns."""

    device = torch.device("cuda", 0)

    def __init__(self, *_: int, **__: int):
        pass

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def wait_event(self, event: FakeEvent) -> None:
        pass

    def wait_stream(self, stream: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class FakeCuda(TorchDispatchMode):
    """Runs what touches the device on fake tensors and all else for real; use `fake_cuda`."""

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self.device = torch.device("cuda", 0)
        self.capability = (9, 0)
        """The compute capability that the driver reports."""
        self.integer = 0
        """What integers of the device read as on the host."""
        self.operators: Counter[str] = Counter()
        """How often each operator ran on the device, by name without overload."""
        self.host_reads = 0
        """How often the host read values of the device, for which it would have waited."""
        self._fake = fake

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if not any(map(_is_of_device, tree_leaves((args, kwargs)))):
            with unset_fake_temporarily():
                result = function(*args, **kwargs)
                if function._schema.name == "c10d::allgather_":
                    _repeat(*args[:2])
                return result
        # Under inference mode, operators arrive that autograd would have taken apart.
        with self:
            parts = function.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        self.operators[function._schema.name] += 1
        if function is torch.ops.aten._local_scalar_dense.default:
            return self._reading(args[0])
        hosts: dict[int, Tensor] = {}

        def as_fake(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
                return value
            faked = self._fake.from_tensor(value)
            hosts[id(faked)] = value
            return faked

        def as_host(value: Any) -> Any:
            if not isinstance(value, FakeTensor) or value.device.type != "cpu":
                return value
            return hosts[id(value)] if id(value) in hosts else self._on_host(value)

        faked = tree_map(as_fake, (args, kwargs))
        return tree_map(as_host, function(*faked[0], **faked[1]))

    def _on_host(self, value: FakeTensor) -> Tensor:
        with unset_fake_temporarily():
            return torch.full(value.shape, self._reading(value), dtype=value.dtype)

    def _reading(self, value: FakeTensor) -> bool | int | float:
        self.host_reads += 1
        return True if value.dtype == torch.bool else 0.0 if value.is_floating_point() else self.integer


def _repeat(outputs: list[list[Tensor]], inputs: list[Tensor]) -> None:
    """Have ranks gather on the host as if all others had what this one has."""
    for parts, own in zip(outputs, inputs, strict=True):
        for part in parts:
            part.copy_(own)


def _is_of_device(value: Any) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type == "cuda")


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """A device while the context is open, in a process started in `guarded_environment`."""
    fake = FakeTensorMode()
    device = FakeCuda(fake)
    # What code asks the driver for rather than a tensor.
    driver = {
        "Event": FakeEvent, "Stream": FakeStream, "current_stream": lambda *_: FakeStream(),
        "stream": lambda stream: stream, "get_device_capability": lambda *_: device.capability,
        "current_device": lambda: 0, "device_count": lambda: 8, "set_device": lambda *_: None,
        "is_initialized": lambda: True,
    }  # fmt: skip
    with mock.patch.multiple(torch.cuda, **driver), fake, device:
        yield device


def why_not() -> str | None:
    """What keeps this machine from backward passes on fake CUDA tensors; None if nothing does."""
    if torch.backends.cuda.is_built():
        return None if torch.cuda.is_available() else "a CUDA build of PyTorch needs a GPU for this, a CPU build none"
    compiler = cpp_extension.get_cxx_compiler()
    try:
        subprocess.run([compiler, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no C++ compiler, which a CPU build of PyTorch needs for this: {error}"
    return None


def guarded_environment() -> dict[str, str]:
    """The environment of a process whose autograd takes fake CUDA tensors; a CUDA build's does so by itself."""
    if torch.backends.cuda.is_built():
        return dict(os.environ)
    # Loaded before PyTorch, which looks for a device once, when it is imported.
    return os.environ | {"LD_PRELOAD": str(_built_guard())}


def _built_guard() -> Path:
    """The compiled guard, made once for each source and PyTorch; several processes may come at once."""
    key = hashlib.sha256(GUARD_SOURCE.read_bytes() + f"{torch.__version__} {torch.__file__}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"spmdrl-tests-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"fake_cuda-{key}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        libraries = Path(torch.__file__).parent / "lib"
        command = [cpp_extension.get_cxx_compiler(), "-shared", "-fPIC", "-std=c++20", str(GUARD_SOURCE)]
        command += [f"-I{path}" for path in cpp_extension.include_paths()]
        command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}", "-o", str(made)]
        subprocess.run(command, check=True)
        made.rename(library)
    return library
