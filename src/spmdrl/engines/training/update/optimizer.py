"""AdamW over shards, its learning-rate schedule, and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from spmdrl.nouns.settings.training_config import OptimConfig
from spmdrl.resources.device import Device

# Kinds of device on which torch's fused AdamW runs; the others take its loop over tensors.
FUSED_ADAMW = ("cpu", "cuda")
# torch.nn.utils.clip_grad_norm_'s guard against division by zero, kept so that curves can be compared.
CLIP_EPS = 1e-6


def learning_rate(config: OptimConfig, step: int, *, num_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `num_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    left = 1 - min(1.0, done)
    return config.lr * (left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


def build_optimizer(config: OptimConfig, parameters: Iterable[nn.Parameter], device: Device) -> torch.optim.AdamW:
    """AdamW with its state allocated at once, so that memory and checkpoints are the same before and after a step."""
    fused = device.kind in FUSED_ADAMW
    # The fused kernel takes sharded and plain tensors, but not in one call.
    sharded: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in parameters:
        (plain if type(parameter.data) is Tensor else sharded).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in (sharded, plain) if group],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused,
    )
    for parameter in (*sharded, *plain):
        optimizer.state[parameter] = {
            # Where torch itself would put it: the fused kernel reads the step on the device.
            "step": torch.zeros((), dtype=torch.float32, device=device.torch_device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """The squared 2-norm of local gradients; over the ranks of one replica these add up to the global one."""
    return float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0


def clip_gradients(gradients: Sequence[Tensor], *, norm: float, max_norm: float) -> None:
    """Scale local gradients in place so that their global norm, which is `norm`, is at most `max_norm`."""
    factor = max_norm / (norm + CLIP_EPS)
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)
