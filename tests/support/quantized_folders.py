"""FP8 and MXFP4 model folders with random weights: `python -m tests.support.quantized_folders FOLDER METHOD` makes one.

The folder holds a tiny model that transformers wrote; its matrices are quantized in place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST_FP8 = 448.0
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NOT_QUANTIZED = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "router")


def fp8_of(weight: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Values [..., R, C] in float8 and their scales [..., ceil(R / rows), ceil(C / columns)] in float32."""
    (height, width), (rows, columns) = block, weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    scales = blocks.abs().amax((-3, -1)).clamp(min=1e-12) / LARGEST_FP8
    scaled = (blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return scaled[..., :rows, :columns].clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).contiguous(), scales


def mxfp4_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [E, C, R / 32, 16] and scales [E, C, R / 32], bytes, of a stacked weight [E, R, C]."""
    groups = weight.float().mT.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2).to(torch.int32)
    scaled = torch.ldexp(groups, -exponents[..., None])
    codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8).contiguous(), (exponents + 127).to(torch.uint8)


def quantize(folder: Path, config: dict[str, Any], replace: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Replace each tensor of the folder's files by others, and set its config.json's quantization_config."""
    for path in folder.glob("*.safetensors"):
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(path).items():
            tensors |= replace(name, tensor)
        save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    content = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(content))


def quantize_to_fp8(folder: Path, block: Sequence[int] = (128, 128), excluded: Sequence[str] = ()) -> None:
    """Quantize all matrices but embeddings, heads, routers and the `excluded` modules."""

    def replace(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if tensor.ndim < 2 or any(part in name for part in (*NOT_QUANTIZED, *excluded)):
            return {name: tensor.bfloat16()}
        values, scales = fp8_of(tensor, block)
        return {name: values, f"{name}_scale_inv": scales}

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    quantize(folder, config | ({"modules_to_not_convert": [*excluded]} if excluded else {}), replace)


def quantize_to_mxfp4(folder: Path) -> None:
    """Quantize gpt-oss's experts."""

    def replace(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor.bfloat16()}
        blocks, scales = mxfp4_of(tensor)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantize(folder, {"quant_method": "mxfp4", "modules_to_not_convert": excluded}, replace)


if __name__ == "__main__":
    {"fp8": quantize_to_fp8, "mxfp4": quantize_to_mxfp4}[sys.argv[2]](Path(sys.argv[1]))
