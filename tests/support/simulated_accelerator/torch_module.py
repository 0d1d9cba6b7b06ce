"""What `torch.<name>` offers of the simulated device: the part of torch.cuda that the job uses, and its test modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

AnyDevice = torch.device | str | int | None


def backend_name() -> str:
    return torch._C._get_privateuse1_backend_name()


class Stream(torch.Stream):
    def __new__(cls, device: AnyDevice = None, priority: int = 0, **ids: int) -> Stream:
        if ids:
            return super().__new__(cls, priority=priority, **ids)
        return super().__new__(cls, device=torch.device(backend_name(), _index(device)), priority=priority)


def _index(device: AnyDevice) -> int:
    index = device if isinstance(device, int) else torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if index is None else index


class DeviceModule(ModuleType):
    """Its methods are the module's functions."""

    _initialized = True
    Stream = Stream

    def __init__(self, name: str, extension: Any):
        super().__init__(f"torch.{name}")
        self._extension = extension
        self._num_taken = 0
        self.before_use: Callable[[], None] = lambda: None

    # A factory, since a subclass of torch.Event is refused by its own elapsed_time.
    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # noqa: N802
        return torch.Event(backend_name(), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def is_available(self) -> bool:
        # Whatever uses a device first asks whether there is one.
        self.before_use()
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def init(self) -> None:
        return

    _lazy_init = init

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_device_name(self, device: AnyDevice = None) -> str:
        return "Simulated accelerator"

    def device_count(self) -> int:
        return self._extension.num_devices

    def current_device(self) -> int:
        return self._extension.current_device()

    def set_device(self, device: AnyDevice) -> None:
        self._extension.set_device(_index(device))

    @contextlib.contextmanager
    def device(self, device: AnyDevice) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def synchronize(self, device: AnyDevice = None) -> None:
        self._extension.synchronize(_index(device))

    def current_stream(self, device: AnyDevice = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def default_stream(self, device: AnyDevice = None) -> Stream:
        kind = torch.accelerator.current_stream(_index(device)).device_type
        return Stream(stream_id=0, device_index=_index(device), device_type=kind)

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextlib.contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream(stream.device_index)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def mem_get_info(self, device: AnyDevice = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(_index(device))

    def memory_allocated(self, device: AnyDevice = None) -> int:
        return torch.accelerator.memory_allocated(_index(device))

    def max_memory_allocated(self, device: AnyDevice = None) -> int:
        return torch.accelerator.max_memory_allocated(_index(device))

    def memory_reserved(self, device: AnyDevice = None) -> int:
        return torch.accelerator.memory_reserved(_index(device))

    def max_memory_reserved(self, device: AnyDevice = None) -> int:
        return torch.accelerator.max_memory_reserved(_index(device))

    def memory_stats(self, device: AnyDevice = None) -> dict[str, Any]:
        return torch.accelerator.memory_stats(_index(device))

    def reset_peak_memory_stats(self, device: AnyDevice = None) -> None:
        torch.accelerator.reset_peak_memory_stats(_index(device))

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(self._extension.default_generator(index) for index in range(self.device_count()))

    def _generator(self, device: AnyDevice = None) -> torch.Generator:
        return self._extension.default_generator(_index(device))

    def manual_seed(self, seed: int) -> None:
        self._generator().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return self._generator().initial_seed()

    def get_rng_state(self, device: AnyDevice = None) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: AnyDevice = None) -> None:
        self._generator(device).set_state(state)

    def races(self) -> list[str]:
        """What the race check found so far; each was also raised at the operator that it names."""
        return self._extension.races()[self._num_taken :]

    def take_races(self) -> list[str]:
        """The same, without these from here on: for tests that expect some."""
        taken = self.races()
        self._num_taken += len(taken)
        return taken

    def check_races(self, on: bool) -> None:
        """Whether accesses are checked for a missing wait; on at first."""
        self._extension.check_races(on)

    def late_copies(self, on: bool) -> None:
        """Whether copies that the host doesn't wait for run as late as is legal; on at first."""
        self._set_mode(self._extension.late_copies, on)

    def late_kernels(self, on: bool) -> None:
        """Whether kernels run as late as is legal; off at first."""
        self._set_mode(self._extension.late_kernels, on)

    def _set_mode(self, change: Any, on: bool) -> None:
        # What was queued by the rules so far is out of the way.
        for index in range(self.device_count()):
            self.synchronize(index)
        change(on)

    def late_counts(self) -> tuple[int, dict[str, int]]:
        """How many kernels were queued since the start, and how many calls of each operator ran at once instead."""
        return self._extension.late_counts()

    def num_queued(self, device: AnyDevice = None) -> int:
        """How much work of the device hasn't run yet."""
        return self._extension.num_queued(_index(device))

    def set_memory_limit(self, num_bytes: int, device: AnyDevice = None) -> None:
        """Allocations that go beyond it raise torch.OutOfMemoryError; 1 GiB at first."""
        self._extension.set_memory_limit(num_bytes, _index(device))
