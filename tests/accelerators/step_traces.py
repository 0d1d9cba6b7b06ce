"""Decoding steps of the sizes and at the addresses that a graph has, on a fake CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmdrl.engines.generation.native.fixed_step import FixedStep, StepShape
from spmdrl.engines.generation.native.forward import CachedDecoder
from spmdrl.engines.generation.native.sampling import RowSampling
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.kernels.ops import TABLE
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.resources.mesh import lone_generation_mesh
from tests.accelerators.fake_cuda import FakeCuda
from tests.support.tuned import TunedRollout

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
]


class _OnTheDevice(TorchDispatchMode):
    """Fails where an operation takes a tensor of the host, but for single numbers: a graph would copy it once."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            assert not isinstance(value, Tensor) or isinstance(value, FakeTensor) or not value.dim(), function
        return function(*args, **(kwargs or {}))


@contextmanager
def pages_of_shapes() -> Iterator[None]:
    """Paged attention that makes a result of its shape: Triton launches nothing on fake tensors."""

    def attend(
        q_BHK: Tensor, keys: Tensor, values: Tensor, tables_BC: Tensor, lengths_B: Tensor, *seen: object
    ) -> Tensor:
        assert tables_BC.dtype == lengths_B.dtype == torch.int32 and lengths_B.is_contiguous()
        return q_BHK.new_empty(*q_BHK.shape[:2], values.shape[-1])

    row = TABLE["paged_attention"]
    found = row["cuda"]
    row["cuda"] = attend
    try:
        yield
    finally:
        row["cuda"] = found


@torch.inference_mode()
def captured_step(cuda: FakeCuda, *, config: DecoderConfig) -> None:
    """Runs on what was fed alone: nothing is read from the device, and every kind of sampling is."""
    decoder = CachedDecoder(
        config, lone_generation_mesh(), cuda.device, torch.bfloat16, TunedRollout(block_size=16), None
    )
    decoder.weights.wake()
    decoder.cache.resize([40] * len(decoder.cache.kinds))
    step = FixedStep(decoder.step_logits, decoder.cache, cuda.device, max_rows=32)
    step.make_room(16)
    for params in SAMPLINGS:
        sampling = RowSampling.of_rows(range(6), [params] * 6, cuda.device)
        step.set_sampling(sampling)
        reads = cuda.host_reads
        with pages_of_shapes(), _OnTheDevice():
            step(StepShape(8, 16, sampling.kinds))
        assert cuda.host_reads == reads, cuda.operators
