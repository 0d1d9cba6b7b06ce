"""A device that is planned for: tensors with shapes and dtypes but without values, beside a host of real tensors.

PyTorch's fake tensors run each operator's rules of shapes and dtypes and compute nothing. Only tensors of the device
are fake: lengths, offsets and tables of the host keep their values, so that the engines run as they are. All that is
allocated on the device, computed there or sent is entered in an `Account`. The host reads zeros from the device, and
1, 2, 3 for integers, but for a few numbers that came from it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed import fake_pg
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from spmdrl.plan.account import Account
from spmdrl.resources.device import BACKENDS, Device
from spmdrl.resources.world import World
from spmdrl.runtime.launch import LaunchEnvironment

NAME = "planned"
_COLLECTIVES = "unsent"
_SET_UP = "_setup_privateuseone_for_python_backend"
_COPIES = {getattr(torch.ops.aten, name) for name in ("_to_copy", "detach", "clone", "alias", "unbind")}
_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.layout, torch.memory_format}
_VALUE, _MOST_VALUES = "_value_on_the_host", 4096
_LIBRARY = torch.library.Library("aten", "IMPL")


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

    def __init__(self, fake: FakeTensorMode, account: Account):
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._account = fake, account
        self._known = _KnownResults(fake)
        self.is_muted = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        given = _Given(args, kwargs)
        if not given.is_of_device:
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
        is_known, result = self._known.of(function, given)
        hosts: dict[int, Tensor] = {}
        if not is_known:
            faked = tree_map(partial(self._as_fake, hosts), (args, kwargs))
            result = function(*faked[0], **faked[1])
            self._known.keep(function, given, _Given(args, kwargs), result)
        if not self.is_muted:
            # Where nothing is returned, tensors given by name are written, as FSDP2's copies of gathered weights are.
            self._account.ran(function, args, given.inputs, given.named if result is None else result)
        if function.overloadpacket in _COPIES:
            _keep_value(result, *args)
        return result if is_known else tree_map(partial(_as_host, hosts), result)

    def _as_fake(self, hosts: dict[int, Tensor], value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        faked = self._fake.from_tensor(value)
        hosts[id(faked)] = value
        return faked


class _Given:
    """Arguments of an operator: their tensors on the device, and all that the shapes of results depend on."""

    def __init__(self, args: Any, kwargs: Any):
        self.tensors, self.key = list[FakeTensor](), list[Any]()
        self.is_of_device = self.has_others = False
        self._add(args)
        num = len(self.tensors)
        self._add((*kwargs, *kwargs.values()))
        self.inputs, self.named = self.tensors[:num], self.tensors[num:]

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                self.is_of_device = True
                self.tensors.append(value)
                self.key.append(_layout(value))
            elif kind in _PLAIN:
                # True and 1 are equal.
                self.key += (kind, value)
            elif kind is list or kind is tuple:
                self.key.append(len(value))
                self._add(value)
            elif kind is torch.device:
                self.is_of_device |= value.type == NAME
                self.key.append(value)
            elif isinstance(value, Tensor):
                self.key.append((value.shape, value.stride(), value.dtype))
            else:
                self.has_others = True


def _layout(value: FakeTensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device


class _KnownResults:
    """Results of operators by what they were given.

    Of thousands few differ. PyTorch keeps them, too, but making its keys takes longer than all else here.
    """

    def __init__(self, fake: FakeTensorMode):
        self._fake, self._recipes = fake, dict[Any, Callable[[list[FakeTensor]], Any] | None]()

    def of(self, function: Any, given: _Given) -> tuple[bool, Any]:
        """Return True and the result, or False if it isn't known."""
        if given.has_others:
            return False, None
        given.key += (function, torch.get_default_dtype())
        recipe = self._recipes.get(tuple(given.key))
        return (False, None) if recipe is None else (True, recipe(given.tensors))

    def keep(self, function: Any, given: _Given, after: _Given, result: Any) -> None:
        """Keep a result, unless an argument has another shape after it."""
        if not given.has_others and given.key[:-2] == after.key:
            self._recipes[tuple(given.key)] = self._recipe(function, given.tensors, result)

    def _recipe(self, function: Any, given: list[FakeTensor], result: Any) -> Callable[[list[FakeTensor]], Any] | None:
        """Return what makes such a result, or None for one that is of the host or shares memory in its own way."""
        if isinstance(result, (list, tuple)):
            kind, recipes = type(result), [self._recipe(function, given, one) for one in result]
            found = [one for one in recipes if one is not None]
            return (lambda tensors: kind([one(tensors) for one in found])) if len(found) == len(recipes) else None
        if not isinstance(result, FakeTensor) or result.fake_device.type != NAME:
            return None
        for place, tensor in enumerate(given):
            if result is tensor:
                return itemgetter(place)
        storage = result.untyped_storage()
        sharing = [place for place, tensor in enumerate(given) if tensor.untyped_storage()._cdata == storage._cdata]
        make = partial(self._make, sharing[0] if sharing else None, _layout(result))
        is_alike = function.is_view if sharing else make(given).untyped_storage().nbytes() == storage.nbytes()
        return make if is_alike else None

    def _make(self, of: int | None, layout: tuple[Any, ...], given: list[FakeTensor]) -> FakeTensor:
        shape, stride, offset, dtype, device = layout
        with fake_tensor.in_kernel_invocation_manager(self._fake):
            if of is None:
                memory = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                memory = torch.as_strided(given[of], shape, stride, offset)
        return FakeTensor(self._fake, memory, device)


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
def planned_device(account: Account) -> Iterator[torch.device]:
    """Yield the device, which exists inside the block."""
    register()
    fake = FakeTensorMode()
    device = PlannedDevice(fake, account)
    # Places in memory are compared by address, which fake tensors have too.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    # In one thread, as there is no device that another one would drive.
    in_one_thread = torch.autograd.set_multithreading_enabled(False)
    with _resizes_seen_by(account), _muted_for_shapes(device), in_one_thread, fake, device:
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
def _resizes_seen_by(account: Account) -> Iterator[None]:
    """Enter resized storages, as no operator does it."""
    resize = torch.UntypedStorage.resize_

    def resize_seen(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resized = resize(storage, size)
        if storage.device.type != "cpu":
            account.resized(storage)
        return resized

    torch.UntypedStorage.resize_ = resize_seen  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
