"""Which function runs an operation on which kind of device: the plain one where none is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import cpu, cuda, invariant, npu, plain

TABLE: dict[str, dict[str, Callable[..., Any]]] = {
    "rms_norm": {"cpu": cpu.rms_norm, "cuda": cuda.rms_norm, "npu": npu.rms_norm},
    "rotate": {"cpu": plain.rotate, "cuda": plain.rotate, "npu": npu.rotate},
    "swiglu": {"cpu": plain.swiglu, "cuda": cuda.swiglu, "npu": npu.swiglu},
    "sigmoid": {"cpu": plain.sigmoid, "cuda": plain.sigmoid, "npu": plain.sigmoid},
    "masked_attention": {"cpu": plain.masked_attention, "cuda": plain.masked_attention, "npu": plain.masked_attention},
    "grouped_linear": {"cpu": cpu.grouped_linear, "cuda": cuda.grouped_linear, "npu": npu.grouped_linear},
    "blocked_linear": {"cpu": cpu.blocked_linear, "cuda": plain.blocked_linear, "npu": plain.blocked_linear},
    "add_matmul": {"cpu": cpu.add_matmul, "cuda": cuda.add_matmul, "npu": npu.add_matmul},
    "packed_attention": {"cpu": cpu.packed_attention, "cuda": cuda.packed_attention, "npu": npu.packed_attention},
}


def compute_batch_invariantly() -> None:
    """From now on run what gives each row the same bits whatever is computed beside it; CPUs in float32 only."""
    # Threads share a product's rows among them, until one of them has too few.
    torch.set_num_threads(1)
    for name, function in invariant.OPERATIONS.items():
        TABLE[name] = {"cpu": function}


def implementation(operation: str, tensor: Tensor) -> Callable[..., Any]:
    """The function for the device that a tensor is on."""
    return TABLE[operation].get(tensor.device.type) or getattr(plain, operation)
