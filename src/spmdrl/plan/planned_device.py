"""A device that is planned for: tensors with shapes and dtypes but without values, beside a host of real tensors.

PyTorch's fake tensors run each operator's rules of shapes and dtypes and compute nothing. Only tensors of the device
are fake: lengths, offsets and tables of the host keep their values, so that the engines run as they are. All that is
allocated on the device, computed there or sent is shown to a `Meter`. The host reads zeros from the device, and
1, 2, 3 for integers, but for a few numbers that came from it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed import fake_pg
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spmdrl.resources.device import BACKENDS, Device
from spmdrl.resources.world import World
from spmdrl.runtime.launch import LaunchEnvironment

NAME = "planned"
_COLLECTIVES = "unsent"
_SET_UP = "_setup_privateuseone_for_python_backend"
_COPIES = {getattr(torch.ops.aten, name) for name in ("_to_copy", "detach", "clone", "alias", "unbind")}
_VALUE, _MOST_VALUES = "_value_on_the_host", 4096
_LIBRARY = torch.library.Library("aten", "IMPL")


class Meter(Protocol):
    """Observer of a device."""

    def ran(self, operator: Any, args: Any, result: Any) -> None:
        """Take note of an operator that ran on the device, with its arguments and its result."""
        ...

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage that got another size, as FSDP2's gathered weights do."""
        ...


class _Nothing:
    """Stream, or event in one, of a device on which nothing takes time: all of its methods do nothing."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., _Nothing]:
        return lambda *_, **__: self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Module(ModuleType):
    """Functions of torch's module of the device, for code that asks the driver rather than a tensor."""

    memory = (0, 0)
    """free bytes and all bytes of the device"""

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return self.memory

    Event = Stream = _Nothing
    # Host memory isn't pinned for a device that isn't there.
    is_available = staticmethod(lambda: False)
    is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    current_stream = staticmethod(_Nothing)
    stream = staticmethod(lambda stream: stream)
    set_device = synchronize = empty_cache = staticmethod(lambda *_: None)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda *_: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float32])


class PlannedDevice(TorchDispatchMode):
    """Runs operators of the device on fake tensors, and all others for real."""

    def __init__(self, fake: FakeTensorMode, meter: Meter):
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._meter = fake, meter
        self.is_muted = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        leaves = tree_leaves((args, kwargs))
        if not any(map(_is_of_device, leaves)):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        # Under inference mode, operators arrive that autograd would have taken apart; those with kernels stay whole.
        if torch.is_inference_mode_enabled() and not _has_kernel(function):
            with self:
                parts = function.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if function is torch.ops.aten._local_scalar_dense.default:
            return _reading_of(args[0])
        hosts: dict[int, Tensor] = {}
        faked = (args, kwargs)
        if any(isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) for leaf in leaves):
            faked = tree_map(partial(self._as_fake, hosts), faked)
        result = function(*faked[0], **faked[1])
        if not self.is_muted:
            self._meter.ran(function, args, result)
        if function.overloadpacket in _COPIES:
            _keep_value(result, *args)
        return tree_map(partial(_as_host, hosts), result)

    def _as_fake(self, hosts: dict[int, Tensor], value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        faked = self._fake.from_tensor(value)
        hosts[id(faked)] = value
        return faked


@cache
def _has_kernel(function: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CPU")


def _as_host(hosts: Mapping[int, Tensor], value: Any) -> Any:
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    return hosts[id(value)] if id(value) in hosts else _on_host(value)


def _keep_value(copy: Tensor | list[Tensor], source: Tensor, *dim: int) -> None:
    """Keep a few numbers of the host in copies on the device, where ranks agree on some, and in parts for `tolist`."""
    value = vars(source).get(_VALUE) if isinstance(source, FakeTensor) else source
    if value is None or value.numel() > _MOST_VALUES:
        return
    with unset_fake_temporarily():
        pairs = zip(value.unbind(*dim), copy, strict=True) if isinstance(copy, list) else [(value, copy)]
    for part, its_copy in pairs:
        if isinstance(its_copy, FakeTensor):
            vars(its_copy)[_VALUE] = part


def _on_host(value: FakeTensor) -> Tensor:
    with unset_fake_temporarily():
        if (kept := vars(value).get(_VALUE)) is not None:
            return kept.clone()
        if value.dtype == torch.bool or value.is_floating_point():
            return torch.full(value.shape, value.dtype == torch.bool, dtype=value.dtype)
        # Tokens that differ by row, so that rows stay apart.
        return torch.arange(1, value.numel() + 1, dtype=value.dtype).view(value.shape)


def _reading_of(value: FakeTensor) -> bool | int | float:
    if _VALUE in vars(value):
        with unset_fake_temporarily():
            return vars(value)[_VALUE].item()
    # An element of several is a view.
    return 0.0 if value.is_floating_point() else True if value.dtype == torch.bool else 1 + int(value.storage_offset())


def _is_of_device(value: Any) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type == NAME)


def _never_called(*_: Any) -> None:
    raise AssertionError("fake tensors run no kernels")


def register() -> None:
    """Make the device known to PyTorch and to its process groups, for the life of the process.

    Raises ValueError where PyTorch has no place for it.
    """
    taken = torch._C._get_privateuse1_backend_name()
    if taken == NAME:
        return
    if taken != "privateuseone":
        raise ValueError(f"plans need the place in PyTorch that {taken} has taken; plan on a machine without {taken}")
    if not (hasattr(backend_registration, _SET_UP) and hasattr(ShardingPropagator, "_fake_mode_lock")):
        raise ValueError(f"plans need PyTorch 2.13, but this is {torch.__version__}; plan on a machine that has it")
    getattr(backend_registration, _SET_UP)(NAME, backend_module=_Module(NAME))
    # Autograd takes this operator apart where a device has no kernel for it.
    _LIBRARY.impl("silu_backward", _never_called, "PrivateUse1")
    devices = ["cpu", NAME]
    dist.Backend.register_backend(_COLLECTIVES, fake_pg._create_fake_pg, extended_api=True, devices=devices)
    BACKENDS[NAME] = ",".join(f"{device}:{_COLLECTIVES}" for device in devices)


@contextlib.contextmanager
def alone_in(launch: LaunchEnvironment) -> Iterator[World]:
    """Yield the world of one rank of a job whose other ranks aren't there: its collectives send nothing."""
    register()
    device = Device(NAME)
    dist.init_process_group(device.backend, store=fake_pg.FakeStore(), rank=launch.rank, world_size=launch.world_size)
    try:
        yield World(launch, device)
    finally:
        dist.destroy_process_group()


def set_memory(free_bytes: int, total_bytes: int) -> None:
    """Let the device have so much memory, for code that takes a share of it."""
    torch.get_device_module(NAME).memory = (free_bytes, total_bytes)


@contextlib.contextmanager
def planned_device(meter: Meter) -> Iterator[torch.device]:
    """Yield the device, which exists inside the block."""
    register()
    fake = FakeTensorMode()
    device = PlannedDevice(fake, meter)
    # Places in memory are compared by address, which fake tensors have too.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    # In one thread, as there is no device that another one would drive.
    in_one_thread = torch.autograd.set_multithreading_enabled(False)
    with _resizes_seen_by(meter), _muted_for_shapes(device), in_one_thread, fake, device:
        yield torch.device(NAME, 0)


@contextlib.contextmanager
def _muted_for_shapes(device: PlannedDevice) -> Iterator[None]:
    """Hide the tensors of global shapes by which DTensor finds the shapes of an operator's results."""
    before = ShardingPropagator._fake_mode_lock

    class Muted:
        def __enter__(self) -> None:
            device.is_muted = True

        def __exit__(self, *_: object) -> None:
            device.is_muted = False

    ShardingPropagator._fake_mode_lock = Muted()  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = before


@contextlib.contextmanager
def _resizes_seen_by(meter: Meter) -> Iterator[None]:
    """Show resized storages to the meter, as no operator does it."""
    resize = torch.UntypedStorage.resize_

    def resize_seen(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resized = resize(storage, size)
        if storage.device.type != "cpu":
            meter.resized(storage)
        return resized

    torch.UntypedStorage.resize_ = resize_seen  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
