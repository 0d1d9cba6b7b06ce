"""The swap of training state beside plain pinned copies: the same bytes come back, and at which rate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from spmdrl.dataflow.resharding.swap import Swap
from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.nouns.roles import POLICY
from spmdrl.resources.memory import MemoryLedger
from spmdrl.verbs.doctor.device_verbs import device_seconds, median_seconds
from spmdrl.verbs.doctor.stage_run import StageRun
from tests.bench.harness.bench_models import QWEN_0_5B, TINY

_MODELS = {"full": QWEN_0_5B, "small": TINY}
_NUM_ROUNDS = 5


def check_swap(run: StageRun) -> None:
    """Move one model's float32 weights out and back several times, on all ranks at once. Collective over the world."""
    device, ledger = run.device, MemoryLedger()
    shapes = parameter_shapes(_MODELS[run.scale])
    weights = {name: torch.empty(shape, device=device.torch_device) for name, shape in shapes.items()}
    _fill(weights)
    num_bytes = sum(weight.nbytes for weight in weights.values())
    before = device.module.memory_allocated()
    swap = Swap(device, ledger, run.folder)
    swap.add_group(POLICY.weights, lambda: weights)
    out, back = [], []
    for number in range(_NUM_ROUNDS + 1):
        # Another version each time, so that each leaving copies.
        out.append(device_seconds(lambda number=number: swap.to_host(POLICY.weights, version=number), device))
        left = device.module.memory_allocated() - (before - num_bytes)
        run.require(abs(left) < 0.01 * num_bytes, f"{left} bytes of {num_bytes} stay on the device after leaving it")
        back.append(device_seconds(lambda: _bring(swap), device))
    _check_bits(run, weights)
    swap.close()
    run.figures["gigabytes"] = num_bytes / 1e9
    pinned = _pinned_rates(run, num_bytes)
    # The first round takes the pinned memory.
    for name, seconds in (("to_host", out[1:]), ("from_host", back[1:])):
        rate = num_bytes / statistics.median(seconds) / 1e9
        run.figures[f"{name}_gb_per_second"] = rate
        run.figures[f"{name}_share_of_pinned"] = rate / pinned[name]


def _bring(swap: Swap) -> None:
    swap.start_return(POLICY.weights)
    swap.finish_return(POLICY.weights)


def _fill(weights: Mapping[str, Tensor]) -> None:
    for number, weight in enumerate(weights.values()):
        torch.arange(weight.numel(), out=weight.view(-1)).add_(number)


def _check_bits(run: StageRun, weights: Mapping[str, Tensor]) -> None:
    for number, (name, weight) in enumerate(weights.items()):
        expected = torch.arange(weight.numel(), dtype=weight.dtype, device=weight.device).add_(number)
        run.require(torch.equal(weight.view(-1), expected), f"{name} came back with other bits than it left with")


def _pinned_rates(run: StageRun, num_bytes: int) -> dict[str, float]:
    """GB/s of one copy of as many bytes, each way."""
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=run.device.torch_device)
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    out = median_seconds(lambda: on_host.copy_(on_device, non_blocking=True), run.device)
    back = median_seconds(lambda: on_device.copy_(on_host, non_blocking=True), run.device)
    return {"to_host": num_bytes / out / 1e9, "from_host": num_bytes / back / 1e9}
