"""The optimizer's step of a training engine: loss, norm and metrics agreed on by all ranks, then AdamW over shards.

Matrices of layers take Muon's step instead where the settings say so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from spmdrl.engines.parallel.muon import MatrixPlace, Muon, is_matrix
from spmdrl.engines.training.microbatch import MemoryRanOut
from spmdrl.engines.training.packed_rows import LossTerms
from spmdrl.engines.training.routers import RouterStatistics
from spmdrl.engines.training.sharded_model import Shard, ShardedModel, local_tensor, sharding_axis
from spmdrl.nouns.settings.training_config import OptimConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.metrics import Recorder, Stat, table_of, totals_of
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.device import Device
from spmdrl.runtime.supervision.activity import activity

# Kinds of device on which torch's fused AdamW runs; the others take its loop over tensors.
FUSED_ADAMW = ("cpu", "cuda", "planned")
# torch.nn.utils.clip_grad_norm_'s guard against division by zero, kept so that curves can be compared.
CLIP_EPS = 1e-6
_LOSS = ""
"""Name of the loss among the metrics."""


def learning_rate(config: OptimConfig, step: int, *, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0, in a run of `num_steps`."""
    warmup_steps = config.warmup_steps or math.ceil(config.warmup_ratio * num_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    left = 1 - min(1.0, done)
    return config.lr * (left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


def build_optimizer(config: OptimConfig, parameters: Iterable[Tensor], device: Device) -> torch.optim.AdamW:
    """Build AdamW with allocated state, so that memory and checkpoints are the same before and after a step."""
    fused = device.kind in FUSED_ADAMW
    # The fused kernel takes sharded and plain tensors, but not in one call.
    sharded: list[Tensor] = []
    plain: list[Tensor] = []
    for parameter in parameters:
        (sharded if hasattr(parameter.data, "placements") else plain).append(parameter)
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
            # Torch's own placement: the fused kernel reads the step on the device.
            "step": torch.zeros((), dtype=torch.float32, device=device.torch_device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """Return the squared 2-norm of local gradients; over the ranks of one replica these add up to the global one."""
    return float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0


def clip_gradients(gradients: list[Tensor], *, norm: float, max_norm: float) -> None:
    """Scale local gradients in place so that their global norm, which is `norm`, is at most `max_norm`."""
    factor = max_norm / (norm + CLIP_EPS)
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)


@dataclass(frozen=True)
class Accumulated:
    """Results of micro-batches besides gradients."""

    terms: Sequence[LossTerms]
    """Their loss terms, still on the device; empty if another rank reports the same ones."""
    router: RouterStatistics | None
    """Statistics of this rank's routers; None in a dense model."""
    num_microbatches: int
    ran_out: str = ""
    """Allocator's message, if this rank's part is missing because its memory ran out."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step, the same on every data rank."""

    loss: float
    grad_norm: float
    """2-norm of the whole gradient, before clipping."""
    lr: float
    metrics: dict[str, tuple[float, float]]
    """Name to (sum, count) over all micro-batches and data ranks."""
    maxima: dict[str, float]
    """Name to the maximum over all micro-batches and data ranks."""
    num_microbatches: int
    """Number of micro-batches of each data rank."""
    skipped: bool
    """True if loss or gradient was not finite, so that weights and optimizer were left unchanged."""


def means_bytes(config: OptimConfig, name: str) -> int:
    """Return the bytes of the optimizer's moving averages for each element of a weight, in float32."""
    return (1 if config.name == "muon" and is_matrix(name) else 2) * torch.float32.itemsize


class Updater:
    """The optimizer over one model's shards."""

    def __init__(self, model: ShardedModel, config: OptimConfig, device: Device, *, num_updates: int):
        """Allocate the means. `num_updates` counts the optimizer steps of the whole run, for the schedule."""
        self._model, self._config, self._num_updates = model, config, num_updates
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._matrices = {name for name in self._trained if config.name == "muon" and is_matrix(name)}
        self._muon = self._make_muon() if self._matrices else None
        others = [weight for name, weight in self._trained.items() if name not in self._matrices]
        self._optimizer = build_optimizer(config, others, device)
        # They are changed in place, and a swap restores their storage.
        self._means = {name: self._means_of(name) for name in self._trained}
        self.step_count = 0
        """Optimizer steps made so far; skipped ones don't count."""

    def step(self, accumulated: Accumulated) -> UpdateResult:
        """Agree on loss, norm and metrics, and step if they are finite. Collective over the mesh.

        Raises MemoryRanOut, on every rank, if some rank's part is missing.
        """
        gradients = self._model.named_gradients()
        faultpoint("optim", *(shard.tensor for shard in gradients.values()))
        squares = squared_norm([shard.tensor for shard in gradients.values() if shard.is_first])
        norm, totals = _agreed(squares, accumulated)
        loss = totals.pop(_LOSS).value
        lr = learning_rate(self._config, self.step_count, num_steps=self._num_updates)
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite:
            self._apply(gradients, norm=norm, lr=lr)
        metrics = {name: (stat.value, stat.count) for name, stat in totals.items() if stat.kind == "mean"}
        if accumulated.router is not None:
            metrics |= accumulated.router.balance(self._model, is_skipped=not is_finite)
        maxima = {name: stat.value for name, stat in totals.items() if stat.kind == "max"}
        return UpdateResult(loss, norm, lr, metrics, maxima, accumulated.num_microbatches, skipped=not is_finite)

    def drop_gradients(self) -> None:
        """Free remaining gradients."""
        for weight in self._trained.values():
            weight.grad = None

    def means(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the local moving averages by parameter name and kind, cut like the weights."""
        return self._means

    def set_step_count(self, step_count: int) -> None:
        """Set the number of optimizer steps, for the schedule and AdamW's bias correction."""
        self.step_count = step_count
        for state in self._optimizer.state.values():
            state["step"].fill_(step_count)

    def _apply(self, gradients: dict[str, Shard], *, norm: float, lr: float) -> None:
        clip_gradients([shard.tensor for shard in gradients.values()], norm=norm, max_norm=self._config.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        if self._muon is not None:
            weights = {name: local_tensor(self._trained[name]) for name in self._matrices}
            found = {name: gradients[name].tensor for name in self._matrices & gradients.keys()}
            self._muon.step(weights, found, lr=lr, weight_decay=self._config.weight_decay)
        self.step_count += 1
        activity.advance("optimizer steps")

    def _make_muon(self) -> Muon:
        weights = {name: weight for name, weight in self._trained.items() if name in self._matrices}
        part_of = self._model.part_of
        places = {name: MatrixPlace(part_of[name], sharding_axis(one, one.ndim - 2)) for name, one in weights.items()}
        local = {name: local_tensor(weight) for name, weight in weights.items()}
        return Muon(local, places, self._model.config, self._model.mesh.tensor)

    def _means_of(self, name: str) -> dict[str, Tensor]:
        if self._muon is not None and name in self._matrices:
            return {"momentum_buffer": self._muon.means[name]}
        state = self._optimizer.state[self._trained[name]]
        return {kind: local_tensor(state[kind]) for kind in ("exp_avg", "exp_avg_sq")}


def _agreed(squares: float, accumulated: Accumulated) -> tuple[float, dict[str, Stat]]:
    """Return the whole gradient's norm and totals of all micro-batches, the same bits on all ranks. Collective.

    `squares` is the square of the gradients that this rank counts as holder of. Stats by name rather than a sum of
    vectors: a rank that ran only dummies has no names of metrics.
    """
    recorder = Recorder()
    recorder.total(_LOSS, 0.0)
    terms = accumulated.terms
    scalars = [(one.loss, *chain(*one.metrics.values()), *one.maxima.values()) for one in terms]
    numbers = iter(_read(list(chain(*scalars))))
    for one in terms:
        recorder.total(_LOSS, next(numbers))
        for name in one.metrics:
            recorder.add(name, Stat("mean", next(numbers), next(numbers)))
        for name in one.maxima:
            recorder.maximum(name, next(numbers))
    payload = json.dumps([squares, table_of(recorder.drain()), accumulated.ran_out]).encode()
    answers = [json.loads(answer) for answer in gather_bytes(payload)]
    for rank, (_, _, ran_out) in enumerate(answers):
        if ran_out:
            raise MemoryRanOut(f"rank {rank} ran out of memory: {ran_out}")
    # In the order of the ranks, as every rank must get the same sum.
    return math.sqrt(sum(square for square, _, _ in answers)), totals_of([table for _, table, _ in answers])


def _read(scalars: Sequence[Tensor]) -> list[float]:
    """Read the values with one copy from the device per dtype: a copy each would take longer than many a kernel."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, scalar in enumerate(scalars):
        groups.setdefault((scalar.device, scalar.dtype), []).append(index)
    numbers = [0.0] * len(scalars)
    for members in groups.values():
        values = torch.stack([scalars[index].reshape(()) for index in members]).tolist()
        for index, value in zip(members, values, strict=True):
            numbers[index] = float(value)
    return numbers
