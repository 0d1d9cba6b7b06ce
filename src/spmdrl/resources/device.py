"""Device operations: cpu, cuda and npu are rows of a table, not branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

DeviceKind = Literal["cpu", "cuda", "npu"]

# The collective library and the RPC back end of each kind of device.
BACKENDS: dict[str, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@dataclass(frozen=True)
class Device:
    """The device of this rank: `index` counts within the node; the CPU has no index."""

    kind: str
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.is_cpu else torch.device(self.kind, self.index)

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def backend(self) -> str:
        """Back end of the process group; host tensors always go by gloo."""
        return BACKENDS[self.kind]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype for `model.dtype: auto`: bfloat16 if the hardware multiplies it fast."""
        return torch.float32 if self.is_cpu else torch.bfloat16

    @property
    def module(self) -> Any:
        """Torch module of this kind of device (torch.cuda, torch.npu)."""
        return getattr(torch, self.kind)

    def select(self) -> None:
        """Make this the current device of the process."""
        if not self.is_cpu:
            self.module.set_device(self.index)

    def synchronize(self) -> None:
        if not self.is_cpu:
            self.module.synchronize()

    def empty_cache(self) -> None:
        """Release cached device memory, so that another allocator in this process can take it."""
        if not self.is_cpu:
            self.module.empty_cache()

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return (used, total) bytes of the device, or None on the CPU, whose memory isn't ours alone."""
        if self.is_cpu:
            return None
        free, total = self.module.mem_get_info()
        return total - free, total

    def held_bytes(self) -> int:
        """Return the device memory in tensors of this process; for accelerators only."""
        return self.module.memory_allocated()

    def take_peak_bytes(self) -> int:
        """Return the peak of PyTorch's device memory since the last call; for accelerators only."""
        peak = self.module.max_memory_allocated()
        self.module.reset_peak_memory_stats()
        return peak


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on a device, copied without waiting for the device's earlier work; itself on the CPU.

    Only pinned memory is copied in the background: from any other, the host waits until the copy's turn has come. The
    pinned copy needn't be kept, since its allocator doesn't reuse the memory before the device has read it.
    """
    if not _pins_for(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the host, copying only if needed; the host waits once for all copies.

    Earlier work of the current stream is computed first.
    """
    copies = [_begin_copy(tensor) if _pins_for(tensor.device) else tensor.cpu() for tensor in tensors]
    for device in {tensor.device for tensor in tensors if _pins_for(tensor.device)}:
        torch.accelerator.current_stream(device).synchronize()
    return copies


def _pins_for(device: torch.device) -> bool:
    """Return True if memory can be pinned for it: it is the process's own kind of device, and not the CPU or a fake."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type


def _begin_copy(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, complete when the current stream has reached it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def find_device(wanted: str, index: int) -> Device:
    """Return a rank's device by its local rank: `wanted` is auto, cpu, cuda or npu.

    Raises ValueError if the wanted kind is missing or the node has fewer devices than ranks.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = found.type if found is not None and found.type in BACKENDS else "cpu"
    if wanted == "cpu" or (wanted == "auto" and kind == "cpu"):
        return Device("cpu")
    if wanted not in ("auto", kind):
        # The kind that this build of PyTorch is for, whether the node has it or not.
        built = torch.accelerator.current_accelerator()
        remedy = "install the PyTorch build for that device"
        if built is not None and built.type == wanted:
            remedy = "this PyTorch is built for it: check the driver, and variables such as CUDA_VISIBLE_DEVICES"
        raise ValueError(
            f"resources.device is {wanted!r}, but PyTorch finds {kind!r} on this node; "
            f"{remedy}, or set resources.device to auto"
        )
    count = torch.accelerator.device_count()
    if index >= count:
        raise ValueError(
            f"local rank {index} has no {kind} device: the node shows {count}; "
            f"start at most {count} ranks per node (--nproc-per-node {count})"
        )
    return Device(kind, index)
