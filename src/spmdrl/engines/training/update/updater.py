"""The part of a training engine that changes weights: adds up gradients, and makes the optimizer's steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spmdrl.engines.parallel.tensor_parallel import sum_tensor_gradients
from spmdrl.engines.training.batching.packed_rows import LossFunction, Scores, Values
from spmdrl.engines.training.passes import Passes, Work
from spmdrl.engines.training.pipeline.pipeline_runner import sum_tied_gradients
from spmdrl.engines.training.routing.router_statistics import RouterStatistics, largest_bias
from spmdrl.engines.training.routing.routers import RoutingConfig
from spmdrl.engines.training.sharding.sharded_model import Shard, local_gradients, local_tensor
from spmdrl.engines.training.update.optimizer import (
    OptimConfig,
    build_optimizer,
    clip_gradients,
    learning_rate,
    squared_norm,
)
from spmdrl.engines.training.update.totals import Tally, Totals


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did, the same on every data rank."""

    loss: float
    grad_norm: float
    """2-norm of the whole gradient, before clipping."""
    lr: float
    metrics: dict[str, tuple[float, float]]
    """Name to (sum, count) over all micro-batches and data ranks."""
    maxima: dict[str, float]
    """Name to the largest over all micro-batches and data ranks."""
    num_microbatches: int
    """Micro-batches that each data rank ran."""
    skipped: bool
    """Whether loss or gradient was not finite, so that weights and optimizer were left as they were."""


@dataclass(frozen=True)
class Accumulated:
    """What rows left behind besides gradients."""

    tally: Tally | None
    """What their micro-batches reported; None where another rank reports the same ones."""
    router: RouterStatistics | None
    """What this rank's routers did; None in a dense model."""
    num_microbatches: int


class Updater:
    """Gradients of one model's shards, and AdamW over them."""

    def __init__(self, passes: Passes, config: OptimConfig, *, num_updates: int, routing: RoutingConfig):
        """Allocate AdamW's means. `num_updates` are the optimizer steps of the whole run, for the schedule."""
        self._passes, self._model, self._device = passes, passes.model, passes.device
        self._config, self._num_updates, self._routing = config, num_updates, routing
        parameters = [parameter for _, parameter in self._model.named_parameters()]
        self.optimizer = build_optimizer(config, parameters, self._device)
        self.step_count = 0
        """Optimizer steps made so far; skipped ones don't count."""

    def accumulate(self, works: list[Work], loss: LossFunction) -> Accumulated:
        """Add the gradient of these micro-batches to the weights'. Collective over the mesh."""
        tally = Tally()

        def finish(work: Work, ratings: Scores | Values) -> Tensor:
            if not work.members:
                return sum(0.0 * values.sum() for values in ratings.tensors)
            terms = loss(ratings, work.micro)
            tally.add(terms)
            return terms.loss

        self._passes.train(works, finish)
        self._sum_copies()
        return Accumulated(tally if self._passes.has_ratings else None, self._router_statistics(works), len(works))

    def step(self, accumulated: Accumulated) -> UpdateResult:
        """Agree on loss, norm and metrics, and step if they are finite. Collective over the mesh."""
        gradients = self._model.named_gradients()
        squares = squared_norm([shard.tensor for shard in gradients.values() if shard.is_first])
        total = Totals.gathered(accumulated.tally, squares)
        lr = learning_rate(self._config, self.step_count, num_steps=self._num_updates)
        if total.is_finite:
            self._apply(gradients, norm=total.grad_norm, lr=lr)
        metrics = total.metrics | self._balance_experts(accumulated.router, is_skipped=not total.is_finite)
        return UpdateResult(
            total.loss, total.grad_norm, lr, metrics, total.maxima, accumulated.num_microbatches,
            skipped=not total.is_finite,
        )  # fmt: skip

    def drop_gradients(self) -> None:
        """Free what is left of gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def means(self) -> dict[str, dict[str, Tensor]]:
        """Local exp_avg and exp_avg_sq by parameter name, cut as the weights are."""
        return {
            name: {kind: local_tensor(self.optimizer.state[parameter][kind]) for kind in ("exp_avg", "exp_avg_sq")}
            for name, parameter in self._model.named_parameters()
        }

    def set_step_count(self, step_count: int) -> None:
        """Go on counting optimizer steps from here, in the schedule and in AdamW's bias correction."""
        self.step_count = step_count
        for state in self.optimizer.state.values():
            state["step"].fill_(step_count)

    def _apply(self, gradients: dict[str, Shard], *, norm: float, lr: float) -> None:
        clip_gradients([shard.tensor for shard in gradients.values()], norm=norm, max_norm=self._config.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.step_count += 1

    def _sum_copies(self) -> None:
        """Complete the gradients of weights that several ranks hold, of which each has found a part. Collective."""
        mesh = self._model.mesh
        for number, decoder in self._model.stages.items():
            gradients = local_gradients(decoder.named_parameters())
            sum_tensor_gradients(gradients, self._model.parts[number], mesh.tensor)
        if self._model.config.tied_head and mesh.pipeline.size > 1:
            sum_tied_gradients(self._model.tied_gradients(), mesh.pipeline)

    def _router_statistics(self, works: list[Work]) -> RouterStatistics | None:
        if self._model.config.moe is None:
            return None
        router = RouterStatistics(self._model.config, self._routing, self._device.torch_device)
        for work in works:
            assert work.route is not None, "the routers' choices of an update are always recorded"
            router.add(work.route)
        return router

    def _balance_experts(self, router: RouterStatistics | None, *, is_skipped: bool) -> dict[str, tuple[float, float]]:
        """Correct the routers' biases after a step, and report the loads. Collective over the mesh."""
        if router is None:
            return {}
        model = self._model
        totals = router.totals(model.mesh)
        metrics = totals.metrics()
        if model.config.moe is not None and model.config.moe.scoring == "sigmoid":
            if self._routing.bias_update_rate and not is_skipped:
                for decoder in model.decoders:
                    totals.update_bias(decoder)
            metrics["router/bias_abs_max"] = largest_bias(model.decoders, model.mesh, self._device.torch_device)
        return {name: (value, 1.0) for name, value in metrics.items()}
