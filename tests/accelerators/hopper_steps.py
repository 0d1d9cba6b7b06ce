"""Compiles decoding steps for Hopper without a GPU: `python -m tests.accelerators.hopper_steps FAMILY...`.

Dynamo and Inductor work as they do with `rollout.compile` on a GPU, from fake tensors, and Triton compiles each kernel
that they make; nothing is launched. Prints the PTX of each family's kernels by name, as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config as inductor
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends import backends
from triton.backends.compiler import GPUTarget

from spmdrl.engines.generation.native.forward import CachedDecoder
from spmdrl.engines.generation.rollout_config import RolloutConfig
from spmdrl.resources.mesh import lone_generation_mesh
from tests.accelerators.fake_cuda import fake_cuda
from tests.accelerators.published_models import PUBLISHED

# An H100 as its driver describes it; builds of PyTorch without CUDA read the name of its architecture.
HOPPER = SimpleNamespace(
    name="NVIDIA H100", gcnArchName="", major=9, minor=0, multi_processor_count=132, warp_size=32,
    max_threads_per_block=1024, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, total_memory=80 << 30,
)  # fmt: skip


class HopperDriver:
    """What Triton's compiler asks a driver for."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class NotLaunched(Exception):
    """Raised where a compiled graph would be run."""


def pretend_hopper(found: ExitStack) -> None:
    """Has Inductor and Triton find the GPU, and leaves what they compile unloaded."""
    backends["nvidia"] = replace(backends["nvidia"], driver=HopperDriver)
    facts = {
        "get_device_properties": HOPPER, "get_compute_capability": 90, "is_available": True,
        "is_bf16_supported": True, "current_device": 0,
    }  # fmt: skip
    answers = {name: staticmethod(lambda *_, fact=fact, **__: fact) for name, fact in facts.items()}
    found.enter_context(mock.patch.multiple(CudaInterface, **answers))
    found.enter_context(mock.patch.object(CudaInterface.Worker, "get_device_properties", lambda *_: HOPPER))
    for name in ("get_device_properties", "current_device"):
        found.enter_context(mock.patch.object(torch.cuda, name, answers[name]))
    # Missing from builds without CUDA; a compiled graph imports it.
    found.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True))
    precompile = CachingAutotuner.precompile
    found.enter_context(
        mock.patch.object(CachingAutotuner, "precompile", lambda tuner, **_: precompile(tuner, warm_cache_only=True))
    )
    found.enter_context(mock.patch.object(CompiledFxGraph, "__call__", mock.Mock(side_effect=NotLaunched)))
    found.enter_context(inductor.patch(compile_threads=1, force_disable_caches=True))


def keep_kernels(found: ExitStack) -> dict[str, str]:
    """PTX by name of each kernel that Triton compiles from now on."""
    kernels: dict[str, str] = {}
    compile_kernel = triton.compile

    def compile_and_keep(*source: Any, **options: Any) -> Any:
        built = compile_kernel(*source, **options)
        assert built.asm["cubin"], built.metadata.name
        kernels[built.metadata.name] = built.asm["ptx"]
        return built

    found.enter_context(mock.patch.object(triton, "compile", compile_and_keep))
    return kernels


@torch.inference_mode()
def compile_step(family: str) -> None:
    """Compile the step of a model of this family, of any number of rows."""
    rollout = RolloutConfig(block_size=16, compile=True)
    with fake_cuda() as cuda:
        decoder = CachedDecoder(PUBLISHED[family], lone_generation_mesh(), cuda.device, torch.bfloat16, rollout, None)
        decoder.weights.wake()
        decoder.weights.pack()
        tokens_B, positions_B = (torch.zeros(8, dtype=torch.int64, device=cuda.device) for _ in range(2))

    def attend(layer: int, q_BHK: Tensor, k_BJK: Tensor, v_BJU: Tensor) -> Tensor:
        raise AssertionError("attention was run")

    # Under a dispatch mode Dynamo compiles nothing; the fake tensors have their device by themselves.
    try:
        decoder.step_logits(tokens_B, positions_B, attend)
    except NotLaunched:
        return
    raise AssertionError("the step wasn't compiled")


def main() -> None:
    kernels = {}
    for family in sys.argv[1:]:
        with ExitStack() as found:
            kernels[family] = keep_kernels(found)
            pretend_hopper(found)
            compile_step(family)
    print(json.dumps(kernels))


if __name__ == "__main__":
    main()
