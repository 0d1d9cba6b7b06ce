"""Which function runs an operation on which kind of device: the plain one where none is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from spmdrl.engines.models.kernels import cpu, cuda, npu, plain

TABLE: dict[str, dict[str, Callable[..., Any]]] = {
    "rms_norm": {"cpu": plain.rms_norm, "cuda": cuda.rms_norm, "npu": npu.rms_norm},
    "rotate": {"cpu": plain.rotate, "cuda": plain.rotate, "npu": npu.rotate},
    "swiglu": {"cpu": plain.swiglu, "cuda": cuda.swiglu, "npu": npu.swiglu},
    "grouped_linear": {"cpu": cpu.grouped_linear, "cuda": cuda.grouped_linear, "npu": npu.grouped_linear},
    "add_matmul": {"cpu": cpu.add_matmul, "cuda": cuda.add_matmul, "npu": npu.add_matmul},
    "packed_attention": {"cpu": cpu.packed_attention, "cuda": cuda.packed_attention, "npu": npu.packed_attention},
}


def implementation(operation: str, tensor: Tensor) -> Callable[..., Any]:
    """The function for the device that a tensor is on."""
    return TABLE[operation].get(tensor.device.type) or getattr(plain, operation)
