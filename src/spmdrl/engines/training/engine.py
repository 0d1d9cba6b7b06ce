"""The training engine: scores rows and updates weights, sharded over the data axes of the update layout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from spmdrl.engines.models.attention import PackedCausalAttention
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.training.axis_collectives import max_across, sum_across
from spmdrl.engines.training.logprobs import logprobs_and_entropy
from spmdrl.engines.training.microbatch import (
    DEFAULT_TOKENS_PER_MICROBATCH,
    DEFAULT_TOKENS_PER_MICROBATCH_ON_CPU,
    RowCost,
    dummy_rows,
    plan_microbatches,
)
from spmdrl.engines.training.optimizer import (
    OptimConfig,
    build_optimizer,
    clip_gradients,
    learning_rate,
    local_gradients,
    squared_norm,
)
from spmdrl.engines.training.parallelize import (
    FSDPModule,
    Shard,
    build_sharded_decoder,
    local_tensor,
    shard_of,
    whole_tensor,
)
from spmdrl.engines.training.rows import LossFunction, LossTerms, MicroBatch, Scores, TokenRows, to_microbatch
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.device import Device
from spmdrl.resources.mesh import UpdateMesh
from spmdrl.types import WeightSlice


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and how a batch is cut up."""

    max_steps: int = 100
    """steps of the whole run; each takes new prompts"""
    updates_per_step: int = 1
    """optimizer steps that a step's samples are split into"""
    epochs_per_step: int = 1
    """times that each sample of a step is trained on"""
    skip_zero_advantage: bool = True
    """leave out rows whose advantage is 0 where they have no gradient; entropy and mismatch are of the rest"""
    max_tokens_per_microbatch: int | None = None
    """tokens that go through the model at once, prompts included; null: 16384, on CPU 4096; a longer row runs alone"""

    def __post_init__(self) -> None:
        for name in ("max_steps", "updates_per_step", "epochs_per_step", "max_tokens_per_microbatch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"train.{name} is {value}, but must be at least 1; raise it or leave it out")

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.max_steps * self.updates_per_step * self.epochs_per_step

    def tokens_per_microbatch(self, device: Device) -> int:
        """The budget of one micro-batch on this kind of device."""
        default = DEFAULT_TOKENS_PER_MICROBATCH_ON_CPU if device.is_cpu else DEFAULT_TOKENS_PER_MICROBATCH
        return self.max_tokens_per_microbatch or default


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did, the same on every data rank."""

    loss: float
    grad_norm: float
    """2-norm of the whole gradient, before clipping."""
    lr: float
    metrics: dict[str, tuple[float, float]]
    """Name to (sum, count) over all micro-batches and data ranks."""
    num_microbatches: int
    """Micro-batches that each data rank ran."""
    skipped: bool
    """Whether loss or gradient was not finite, so that weights and optimizer were left as they were."""


class WeightSource(Protocol):
    """Where weights are read from."""

    def read(self, wanted: WeightSlice, /) -> Tensor:
        """Return the values of one box of a named weight."""
        ...


class TrainingEngine:
    """One model's update shards and their optimizer.

    A loss function is handed in with each update, so the engine knows no algorithm. Weights are allocated when the
    engine is built and mean nothing until `load`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        training: TrainingConfig,
        optim: OptimConfig,
        mesh: UpdateMesh,
        device: Device,
        *,
        frozen: bool = False,
        temperature: float = 1.0,
        compute_dtype: torch.dtype | None = None,
    ):
        """Build the shards. Collective over the mesh.

        A frozen engine only scores; it has no optimizer and keeps its weights in the dtype that it computes in. The
        others keep float32 weights. `compute_dtype` is the device's own unless given.
        """
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, but log-probabilities divide by it; use one above 0")
        compute_dtype = compute_dtype or device.compute_dtype
        self.config, self.training, self.optim = config, training, optim
        self.mesh, self.device, self.temperature = mesh, device, temperature
        self.compute_dtype = compute_dtype
        self.weights_on_device = True
        """False while a swap holds the weights on the host; computing then raises RuntimeError."""
        self.step_count = 0
        """Optimizer steps made so far; skipped ones don't count."""
        self.decoder = build_sharded_decoder(
            config,
            mesh,
            device=device.torch_device,
            parameter_dtype=compute_dtype if frozen else torch.float32,
            compute_dtype=compute_dtype,
        ).requires_grad_(not frozen)
        self.optimizer = None if frozen else build_optimizer(optim, self.decoder.parameters(), device)
        self._row_cost = RowCost.of_model(config)

    def load(self, source: WeightSource) -> None:
        """Fill the weights; each rank reads only the slices that it holds."""
        self.check_weights_present("load")
        for shard in self.named_shards().values():
            if shard.slice.num_elements:
                shard.tensor.copy_(source.read(shard.slice))

    def score(self, rows: TokenRows) -> Scores:
        """Rate the response tokens without a gradient; host tensors in row order. Collective over the data axes."""
        self.check_weights_present("score")
        logprobs_R = torch.empty(rows.num_response_tokens, dtype=torch.float32)
        entropy_R = torch.empty_like(logprobs_R)
        for members in self._plan(rows):
            with torch.no_grad():
                scores, _ = self._forward(rows.select(members) if members else dummy_rows())
            if members:
                index = rows.response_index(members)
                logprobs_R[index] = scores.logprobs_R.to("cpu")
                entropy_R[index] = scores.entropy_R.to("cpu")
        return Scores(logprobs_R, entropy_R)

    def update(self, rows: TokenRows, loss: LossFunction) -> UpdateResult:
        """Make one optimizer step over this rank's rows and its peers'. Collective over the data axes.

        A loss or gradient that is not finite, on any rank, makes all ranks skip the step. Gradients are gone
        afterwards. Raises ValueError, on every rank, where no rank has rows.
        """
        self.check_weights_present("update")
        if self.optimizer is None:
            raise RuntimeError("this engine is frozen, so it has no optimizer to update with; build it unfrozen")
        plan = self._plan(rows)
        if not plan:
            raise ValueError("an update needs rows on at least one data rank, but there are none; skip the update")
        try:
            tally = _Tally()
            for members in plan:
                self._accumulate(rows, members, loss, tally)
            return self._step(self.optimizer, tally, num_microbatches=len(plan))
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def named_shards(self) -> dict[str, Shard]:
        """The weights that this rank holds, by name."""
        return {name: shard_of(name, parameter) for name, parameter in self.decoder.named_parameters()}

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight whole, good until the next one. Collective: every rank takes all of them."""
        self.check_weights_present("gather weights")
        for name, parameter in self.decoder.named_parameters():
            yield name, whole_tensor(parameter).to(dtype)

    @property
    def update_count(self) -> int:
        """How often the weights changed by an update; the policy version that generation reports."""
        return self.step_count

    def reshard(self) -> None:
        """Leave nothing on the device but this rank's shards."""
        for module in self.decoder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def drop_gradients(self) -> None:
        """Free what is left of gradients; updates do so themselves."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def optimizer_tensors(self) -> list[Tensor]:
        """AdamW's means, local parts, in the order of the parameters; the step counts are too small to count."""
        return [tensor for means in self.optimizer_state().values() for tensor in means.values()]

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Local exp_avg and exp_avg_sq by parameter name, cut as `named_shards` are."""
        if self.optimizer is None:
            return {}
        return {
            name: {kind: local_tensor(self.optimizer.state[parameter][kind]) for kind in ("exp_avg", "exp_avg_sq")}
            for name, parameter in self.decoder.named_parameters()
        }

    def set_step_count(self, step_count: int) -> None:
        """Go on counting optimizer steps from here, in the schedule and in AdamW's bias correction."""
        assert self.optimizer is not None, "a frozen engine makes no steps"
        self.step_count = step_count
        for state in self.optimizer.state.values():
            state["step"].fill_(step_count)

    def check_weights_present(self, action: str) -> None:
        """Raise RuntimeError while a swap holds the weights: reading freed storage would end the process."""
        if not self.weights_on_device:
            raise RuntimeError(
                f"cannot {action}: the update weights are away on the host; bring them back to the device first"
            )

    def sum_over_rows(self, counts: Sequence[int]) -> list[int]:
        """Sums of host numbers over the groups of ranks that have rows of their own. Collective over the data axes."""
        return sum_across(torch.tensor(counts), self.mesh.data).tolist()

    def _plan(self, rows: TokenRows) -> list[list[int]]:
        return plan_microbatches(
            rows.lengths_B.tolist(),
            max_tokens=self.training.tokens_per_microbatch(self.device),
            cost=self._row_cost,
            agree=lambda count: int(max_across(torch.tensor([count]), self.mesh.data)),
        )

    def _forward(self, rows: TokenRows) -> tuple[Scores, MicroBatch]:
        micro = to_microbatch(rows, self.device.torch_device)

        # A tuple, because FSDP looks for tensors with gradients in what forward returns.
        def head(hidden_TD: Tensor, head_weight_VD: Tensor) -> tuple[Tensor, Tensor]:
            return logprobs_and_entropy(
                hidden_TD[micro.predicting_R], head_weight_VD, micro.targets_R, temperature=self.temperature
            )

        attend = PackedCausalAttention(rows.offsets)
        logprobs_R, entropy_R = self.decoder(micro.tokens_T, micro.positions_T, attend, head)
        return Scores(logprobs_R, entropy_R), micro

    def _accumulate(self, rows: TokenRows, members: list[int], loss: LossFunction, tally: _Tally) -> None:
        """Add one micro-batch's gradient. Collective over the data axes."""
        scores, micro = self._forward(rows.select(members) if members else dummy_rows())
        if members:
            terms = loss(scores, micro)
            tally.add(terms)
            terms.loss.backward()
        else:
            (0.0 * (scores.logprobs_R.sum() + scores.entropy_R.sum())).backward()

    def _step(self, optimizer: torch.optim.AdamW, tally: _Tally, *, num_microbatches: int) -> UpdateResult:
        """Agree on loss, norm and metrics, and step if they are finite. Collective over the data axes."""
        gradients = local_gradients(self.decoder.parameters())
        total = _Totals.gathered(tally, squared_norm(gradients), self.mesh)
        lr = learning_rate(self.optim, self.step_count, num_steps=self.training.num_updates)
        skipped = not (math.isfinite(total.loss) and math.isfinite(total.grad_norm))
        if not skipped:
            clip_gradients(gradients, norm=total.grad_norm, max_norm=self.optim.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            self.step_count += 1
        return UpdateResult(total.loss, total.grad_norm, lr, total.metrics, num_microbatches, skipped)


@dataclass
class _Tally:
    """Loss terms of this rank's micro-batches, left on the device until all are done."""

    terms: list[LossTerms] = field(default_factory=list)

    def add(self, terms: LossTerms) -> None:
        metrics = {name: (total.detach(), count.detach()) for name, (total, count) in terms.metrics.items()}
        self.terms.append(LossTerms(terms.loss.detach(), metrics))

    def entries(self) -> Iterator[tuple[str, float, float]]:
        """(name, sum, count) of every micro-batch; the loss goes under the empty name."""
        for terms in self.terms:
            yield "", float(terms.loss), 0.0
            for name, (total, count) in terms.metrics.items():
                yield name, float(total), float(count)


@dataclass(frozen=True)
class _Totals:
    """Sums over the data ranks, from which every rank draws the same conclusion."""

    loss: float
    grad_norm: float
    metrics: dict[str, tuple[float, float]]

    @classmethod
    def gathered(cls, tally: _Tally, local_squared_norm: float, mesh: UpdateMesh) -> _Totals:
        """Add up in rank order, so that every rank gets the same bits. Collective over the data axes.

        Bytes rather than a sum of vectors: a rank that ran only dummies doesn't know the metrics' names.
        """
        payload = json.dumps([local_squared_norm, _summed(tally.entries())]).encode()
        answers = [json.loads(answer) for answer in gather_bytes(payload)]
        # Every replica holds the same gradients, so each square arrives once a replica.
        num_replicas = mesh.layout.data
        grad_norm = math.sqrt(sum(square for square, _ in answers) / num_replicas)
        sums = _summed((name, *pair) for _, pairs in answers for name, pair in pairs.items())
        loss, _ = sums.pop("")
        return cls(loss, grad_norm, sums)


def _summed(entries: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    sums: dict[str, tuple[float, float]] = {}
    for name, total, count in entries:
        old_total, old_count = sums.get(name, (0.0, 0.0))
        sums[name] = (old_total + total, old_count + count)
    return sums
