"""Quantized tensors of a model folder as bfloat16, dequantized slice by slice when they are read.

`fp8` is DeepSeek's: values of float8 with one factor per block of a matrix. `mxfp4` is gpt-oss's: two values of 4 bits
per byte, with a power of two as the factor of 32 of them. Values equal transformers' dequantized ones to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.hf.config_values import entries, only, values
from spmdrl.engines.models.hf.tensor_files import TensorFiles
from spmdrl.nouns.batch import WeightSlice

_SIXTEENS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUP, _GROUP_BYTES = 32, 16


@dataclass(frozen=True)
class BlockFp8:
    """Matrices, the last two dims of a tensor, with a factor for each block of rows and columns."""

    block: tuple[int, int]
    method = "fp8"
    values, values_dtypes = "", ("F8_E4M3",)
    scales, scales_dtypes = "_scale_inv", ("F32", "BF16", "F16")

    def shape(self, packed: tuple[int, ...]) -> tuple[int, ...]:
        """Return a weight's shape."""
        return packed

    def scales_shape(self, packed: tuple[int, ...]) -> tuple[int, ...]:
        """Return the scales' shape; the last blocks may be smaller."""
        return *packed[:-2], *(-(-size // block) for size, block in zip(packed[-2:], self.block, strict=True))

    def read(self, files: TensorFiles, wanted: WeightSlice) -> Tensor:
        """Read a slice of a weight."""
        height, width = self.block
        (top, left), (bottom, right) = wanted.starts[-2:], wanted.stops[-2:]
        blocks = WeightSlice(
            wanted.name + self.scales,
            (*wanted.starts[:-2], top // height, left // width),
            (*wanted.stops[:-2], -(-bottom // height), -(-right // width)),
        )
        scales = files.read(blocks).to(torch.float32)
        # Repeated over columns only: a factor for each element would take more memory than the weight.
        factors = scales.repeat_interleave(width, -1).narrow(-1, left % width, right - left)
        packed, out = files.read(wanted), torch.empty(wanted.shape, dtype=torch.bfloat16)
        for number in range(factors.shape[-2]):
            start = (blocks.starts[-2] + number) * height - top
            rows = slice(max(start, 0), min(start + height, bottom - top))
            out[..., rows, :] = packed[..., rows, :].to(torch.float32).mul_(factors[..., number, None, :])
        return out


class Mxfp4:
    """Stacked matrices, stored transposed: bytes [experts, columns, groups, 16] and exponents, one per group."""

    method = "mxfp4"
    values, values_dtypes = "_blocks", ("U8",)
    scales, scales_dtypes = "_scales", ("U8",)

    def shape(self, packed: tuple[int, ...]) -> tuple[int, ...]:
        """Return a weight's shape."""
        experts, columns, groups, _ = packed
        return experts, groups * _GROUP, columns

    def scales_shape(self, packed: tuple[int, ...]) -> tuple[int, ...]:
        """Return the scales' shape."""
        return packed[:3] if len(packed) == 4 and packed[3] == _GROUP_BYTES else ()

    def read(self, files: TensorFiles, wanted: WeightSlice) -> Tensor:
        """Read a slice of a weight."""
        (expert, top, left), (stop, bottom, right) = wanted.starts, wanted.stops
        starts, stops = (expert, left, top // _GROUP), (stop, right, -(-bottom // _GROUP))
        packed = files.read(WeightSlice(wanted.name + self.values, (*starts, 0), (*stops, _GROUP_BYTES)))
        scales = files.read(WeightSlice(wanted.name + self.scales, starts, stops))
        sixteens = torch.tensor(_SIXTEENS, dtype=torch.bfloat16)
        # The values of each byte: its lower four bits come first.
        pairs = torch.stack((sixteens.repeat(16), sixteens.repeat_interleave(16)), 1)
        out = torch.empty((stop - expert, right - left, bottom - top), dtype=torch.bfloat16)
        for expert_out, one, exponents in zip(out, packed, scales, strict=True):
            numbers = pairs[one.to(torch.int32)].flatten(-2)
            torch.ldexp(numbers, exponents.to(torch.int32)[..., None] - 127, out=numbers)
            expert_out.copy_(numbers.flatten(-2).narrow(-1, top % _GROUP, bottom - top))
        return out.mT


@dataclass(frozen=True)
class Quantization:
    """The quantization_config of a config.json."""

    packing: BlockFp8 | Mxfp4
    excluded: tuple[str, ...]
    """Modules that aren't quantized: their names, the beginnings or ends of names, with `*` for any characters."""

    def excludes(self, tensor: str) -> bool:
        """Return True if a tensor's module isn't quantized."""
        module = tensor.rpartition(".")[0]
        return any(
            module.endswith(one) or re.match(".*".join(map(re.escape, one.split("*"))) + r"(?![^.])", module)
            for one in self.excluded
        )


def read_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """Read config.json's quantization_config, if any; raises ValueError for any other method than fp8 and mxfp4."""
    if raw.get("quantization_config") is None:
        return None
    given = entries(raw, "quantization_config")
    excluded = tuple(values(given, "modules_to_not_convert", str) or values(given, "ignored_layers", str))
    if (method := given.get("quant_method")) == Mxfp4.method:
        return Quantization(Mxfp4(), excluded)
    if method != BlockFp8.method:
        raise ValueError(
            f"quantization_config {method!r} is not supported; supported are {BlockFp8.method!r} and "
            f"{Mxfp4.method!r}: give the model's unquantized weights"
        )
    only(given, "fmt", "e4m3")
    only(given, "activation_scheme", "dynamic")
    only(given, "expert_dtype", "fp8")
    block = values(given, "weight_block_size", int)
    if len(block) != 2 or min(block) < 1:
        raise ValueError(
            f"quantization_config.weight_block_size is {given.get('weight_block_size')!r}, but must be the rows and "
            "columns of a block, such as [128, 128]; give the model's unquantized weights"
        )
    return Quantization(BlockFp8((block[0], block[1])), excluded)


class DequantizedFiles:
    """Tensors of a quantized folder, like `TensorFiles`: quantized weights in bfloat16, the others as they are."""

    def __init__(self, files: TensorFiles, quantization: Quantization):
        self._files = files
        self._quantization = quantization
        self._packing = packing = quantization.packing
        stored = set(files.names)
        weights = (name.removesuffix(packing.scales) for name in files.names if name.endswith(packing.scales))
        self._quantized = {name for name in weights if name + packing.values in stored}
        parts = {name + end for name in self._quantized for end in (packing.values, packing.scales)}
        self.names = [*(name for name in files.names if name not in parts), *sorted(self._quantized)]

    def path(self, name: str) -> Path:
        return self._files.path(name + self._packing.values if name in self._quantized else name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape. Raises ValueError unless its quantized values and scales fit each other."""
        if name not in self._quantized:
            return self._files.shape(name)
        self._check(name)
        return self._packing.shape(self._files.shape(name + self._packing.values))

    def dtype(self, name: str) -> str:
        return "BF16" if name in self._quantized else self._files.dtype(name)

    def read(self, box: WeightSlice) -> Tensor:
        return self._packing.read(self._files, box) if box.name in self._quantized else self._files.read(box)

    def _check(self, name: str) -> None:
        packing, files = self._packing, self._files
        packed, scales = name + packing.values, name + packing.scales
        if self._quantization.excludes(name):
            raise ValueError(
                f"{name} in {files.folder} is quantized, but its module is in quantization_config's "
                "modules_to_not_convert; remove it there, or fetch the weights again"
            )
        for one, dtypes in ((packed, packing.values_dtypes), (scales, packing.scales_dtypes)):
            if (dtype := files.dtype(one)) not in dtypes:
                raise ValueError(
                    f"{one} in {files.folder} is stored as {dtype}, but {packing.method} has {' or '.join(dtypes)}; "
                    "give the model's unquantized weights"
                )
        shape, found = files.shape(packed), files.shape(scales)
        if len(shape) < 2 or found != packing.scales_shape(shape):
            raise ValueError(
                f"{scales} in {files.folder} has shape {found}, which doesn't fit {packed} of shape {shape}; do "
                "config.json and the weights belong together?"
            )
