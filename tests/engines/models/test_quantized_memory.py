"""Loading a quantized folder takes the 16-bit weights, and less beside them than one of its files holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spmdrl.engines.models.hf.model_weights import WeightFiles
from spmdrl.engines.models.hf.quantized import read_quantization
from spmdrl.engines.models.hf.stored_forms import StoredForm, StoredForms
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.resources.world import World
from tests.bench.memory.memory_ranks import give_freed_blocks_back
from tests.engines.training.test_peak_memory import reset_peak, status
from tests.support.quantized_folders import fp8_of, mxfp4_of
from tests.support.ranks import run_ranks

MIB = 1 << 20
NUM_FILES = 4
FORMS = StoredForms((StoredForm("gate_up", {"gate": 1, "up": 1}, dim=1, transposed=True),))
CONFIGS = {"fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "mxfp4": {"quant_method": "mxfp4"}}


def make_folder(folder: Path, method: str) -> None:
    """Files of 8 MiB: two matrices of float8, or a stack of eight matrices of 4 bits, equal in all files."""
    places = {}
    values, factors = (x.repeat(16, 1) for x in fp8_of(torch.randn(128, 2048), (128, 128)))
    blocks, exponents = (x.repeat(8, 32, *[1] * (x.ndim - 2)) for x in mxfp4_of(torch.randn(1, 1024, 64)))
    for number in range(NUM_FILES):
        layer, file = f"model.layers.{number}.", f"model-{number}.safetensors"
        if method == "fp8":
            tensors = {f"{layer}{part}": values.clone() for part in ("a", "b")}
            tensors |= {f"{name}_scale_inv": factors.clone() for name in tensors}
        else:
            tensors = {f"{layer}gate_up_blocks": blocks, f"{layer}gate_up_scales": exponents}
        save_file(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def load_all(world: World, folders: dict[str, Path]) -> dict[str, tuple[int, int]]:
    give_freed_blocks_back()
    return {method: load(folder, method) for method, folder in folders.items()}


def load(folder: Path, method: str) -> tuple[int, int]:
    """Return the bytes of the loaded weights, and the peak of memory while they are loaded, above that before."""
    files = WeightFiles(folder, FORMS, read_quantization({"quantization_config": CONFIGS[method]}))
    shapes = {name: files.shape(name) for name in files.names}
    first, shape = next(iter(shapes.items()))
    # What the first operations allocate for good is not counted.
    files.read(WeightSlice(first, (0,) * len(shape), (1,) * len(shape)))
    before, mapped, weights = reset_peak(), status("RssFile"), {}
    for name, shape in shapes.items():
        weights[name] = torch.empty(shape, dtype=torch.bfloat16).copy_(files.read(whole_slice(name, shape)))
    # Mapped pages of the files only grow here, and the kernel takes them back when it needs them.
    peak = status("VmHWM") - before - (status("RssFile") - mapped)
    return sum(weight.nbytes for weight in weights.values()), peak


@pytest.mark.cpu_only(reason="it measures resident memory of the host")
@pytest.mark.ranks
@pytest.mark.slow
def test_a_quantized_folder_is_loaded_within_the_16_bit_weights_and_one_file(tmp_path: Path) -> None:
    folders = {method: tmp_path / method for method in CONFIGS}
    for method, folder in folders.items():
        folder.mkdir()
        make_folder(folder, method)
    try:
        [found] = run_ranks(1, load_all, folders, timeout=300)
    finally:
        shutil.rmtree(tmp_path)
    for method, (weights, peak) in found.items():
        print(f"{method}: weights {weights / MIB:.0f} MiB, peak {peak / MIB:.0f} MiB")
        assert weights < peak < weights + weights // NUM_FILES
