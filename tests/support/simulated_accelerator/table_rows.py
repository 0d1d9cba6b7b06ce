"""The simulated device's rows of spmdrl's tables: it computes as a CPU does."""

from __future__ import annotations

import torch

from spmdrl.engines.generation.native import cached_attention
from spmdrl.engines.models.kernels import cpu, ops, packed, plain, prefixed
from spmdrl.engines.training import updater as optimizer
from spmdrl.resources import device as devices

DELTA = ("causal_conv", "conv_step", "gated_delta", "gated_delta_step")
"""Operations of linear attention."""
# It reads memory by its address, which on the device a kernel alone may.
_LIBRARY = torch.library.Library("simulated", "DEF")
_LIBRARY.define(
    "paged_attention(Tensor queries, Tensor keys, Tensor values, Tensor tables, Tensor lengths, int? window=None, "
    "Tensor? sinks=None) -> Tensor"
)
_LIBRARY.impl("paged_attention", cpu.paged_attention, "CPU")


def fill_tables(name: str, library: str) -> None:
    """Add the rows of the device of this name, whose collective library has that one."""
    devices.BACKENDS[name] = f"cpu:gloo,{name}:{library}"
    for functions in ops.TABLE.values():
        functions[name] = functions["cpu"]
    # Weights in blocks are oneDNN's own tensors, and its products are a CPU's, which no other device can hold or run.
    ops.TABLE["blocked_linear"][name], ops.TABLE["linear"][name] = plain.blocked_linear, plain.linear
    # Nor does it read memory by its address.
    for operation in ("rms_norm", "rotate", "swiglu", "exponential_sums", "minus_expected", *DELTA):
        ops.TABLE[operation][name] = getattr(plain, operation)
    ops.TABLE["packed_attention"][name] = packed.padded_attention
    ops.TABLE["prefixed_attention"][name] = prefixed.padded_prefixed_attention
    ops.TABLE["paged_attention"][name] = torch.ops.simulated.paged_attention
    cached_attention.WHOLE_ROW_TILES[name] = cached_attention.WHOLE_ROW_TILES["cpu"]
    cached_attention.ONE_BY_ONE[name] = cached_attention.ONE_BY_ONE["cpu"]
    optimizer.FUSED_ADAMW += (name,)
