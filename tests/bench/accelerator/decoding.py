"""Decoding by the native engine with random weights: its rate beside what reading weights and cache alone takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from spmdrl.resources.device import Device
from spmdrl.verbs.doctor.device_verbs import device_seconds, median_seconds
from spmdrl.verbs.doctor.stage_run import Scale, StageRun
from tests.bench.harness.bench_models import QWEN_0_5B, QWEN_7B, TINY

_GIB = 1 << 30


@dataclass(frozen=True)
class DecodeSizes:
    """What is decoded: each batch of rows with each model."""

    models: dict[str, DecoderConfig]
    batches: Sequence[int]
    prompt_length: int
    steps: int
    """that are timed, after as many of warm-up"""
    copied_bytes: int
    """of the copy that measures the memory's bandwidth"""

    @property
    def tokens_per_row(self) -> int:
        """Prompt and response; no row ends before the last step that is timed."""
        return self.prompt_length + 4 * self.steps


_SIZES: dict[Scale, DecodeSizes] = {
    "full": DecodeSizes({"0.5B": QWEN_0_5B, "7B": QWEN_7B}, (1, 16, 64, 256), 128, 32, _GIB),
    "small": DecodeSizes({"tiny": TINY}, (4, 16), 8, 4, 4 << 20),
}


def check_decode_speed(run: StageRun) -> None:
    """Each rank decodes rows of its own with whole weights."""
    sizes, device = _SIZES[run.scale], run.device
    bandwidth = copy_bandwidth(device, sizes.copied_bytes)
    run.figures["memory_gb_per_second"] = bandwidth / 1e9
    for name, config in sizes.models.items():
        missing = _missing_bytes(config, sizes, device)
        if missing > 0:
            run.figures[name] = f"left out, as it needs {missing / _GIB:.1f} GiB more than are free"
            continue
        for batch in sizes.batches:
            rate = _tokens_per_second(config, sizes, batch, device)
            limit = batch * bandwidth / _bytes_per_step(config, sizes, batch, device.compute_dtype)
            run.figures[f"{name}_batch_{batch}_tokens_per_second"] = rate
            run.figures[f"{name}_batch_{batch}_share_of_limit"] = rate / limit


def copy_bandwidth(device: Device, num_bytes: int) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source), device)


def _weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    return sum(map(math.prod, parameter_shapes(config).values())) * dtype.itemsize


def _cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    return config.num_layers * config.num_kv_heads * 2 * config.head_size * dtype.itemsize


def _cache_bytes(config: DecoderConfig, sizes: DecodeSizes, batch: int, dtype: torch.dtype) -> int:
    """For all rows whole, with room for blocks that are half empty."""
    return batch * (sizes.tokens_per_row + 2 * RolloutConfig().block_size) * _cache_bytes_per_token(config, dtype)


def _missing_bytes(config: DecoderConfig, sizes: DecodeSizes, device: Device) -> float:
    """By how much weights, the largest cache and a tenth more exceed the device's free memory."""
    memory = device.memory_bytes()
    if memory is None:
        return 0
    used, total = memory
    dtype = device.compute_dtype
    needed = _weight_bytes(config, dtype) + _cache_bytes(config, sizes, max(sizes.batches), dtype)
    return 1.1 * needed + sizes.copied_bytes - (total - used)


def _bytes_per_step(config: DecoderConfig, sizes: DecodeSizes, batch: int, dtype: torch.dtype) -> float:
    """What a step can't do without reading: each weight once, and the keys and values of all rows so far."""
    weights = _weight_bytes(config, dtype)
    if not config.tied_head:
        # Of the embedding only the rows' own vectors are read.
        weights -= config.vocab_size * config.hidden_size * dtype.itemsize
    mean_length = sizes.prompt_length + 1.5 * sizes.steps
    return weights + batch * mean_length * _cache_bytes_per_token(config, dtype)


def _tokens_per_second(config: DecoderConfig, sizes: DecodeSizes, batch: int, device: Device) -> float:
    engine = random_engine(config, _rollout(config, sizes, batch, device.compute_dtype), device)
    engine.submit(requests_of(config, sizes, batch))

    def decode() -> None:
        for _ in range(sizes.steps):
            engine.step()

    # Prompts, what is compiled or captured, and the first steps.
    for _ in range(math.ceil(batch * sizes.prompt_length / RolloutConfig().max_prefill_tokens)):
        engine.step()
    decode()
    seconds = device_seconds(decode, device)
    assert engine.num_unfinished == batch, (engine.num_unfinished, batch)
    engine.abort()
    engine.sleep()
    device.empty_cache()
    return batch * sizes.steps / seconds


def _rollout(config: DecoderConfig, sizes: DecodeSizes, batch: int, dtype: torch.dtype) -> RolloutConfig:
    return RolloutConfig(max_running_rows=batch, kv_cache_gib=_cache_bytes(config, sizes, batch, dtype) / _GIB)


def random_engine(config: DecoderConfig, rollout: RolloutConfig, device: Device) -> NativeEngine:
    """An engine that is awake, with random weights made on the device, the same for each call."""
    engine = NativeEngine(config, rollout, device.torch_device, device.compute_dtype)
    generator = torch.Generator(device.torch_device).manual_seed(0)
    for name, weight in engine.wake_weights().items():
        if name.endswith("norm.weight"):
            weight.fill_(1)
        elif name.endswith("bias"):
            weight.zero_()
        else:
            weight.normal_(0, 0.02, generator=generator)
    engine.wake_cache()
    return engine


def requests_of(config: DecoderConfig, sizes: DecodeSizes, batch: int) -> list[Request]:
    """Rows with prompts of their own, none of which ends before `tokens_per_row`."""
    sampling = SamplingParams(max_tokens=sizes.tokens_per_row - sizes.prompt_length)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocab_size, (batch, sizes.prompt_length), generator=generator).tolist()
    return [Request((row,), tuple(prompt), (row,), sampling) for row, prompt in enumerate(prompts)]
