"""The training engine: scores rows and updates weights, under any update layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_weights import WeightSource
from spmdrl.engines.models.lora import is_adapter, unadapted
from spmdrl.engines.training.fitted_passes import FittedPasses
from spmdrl.engines.training.heads import check_head
from spmdrl.engines.training.packed_rows import Likeliest, LossFunction, LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.parallelize import Precision, build_sharded_model
from spmdrl.engines.training.passes import Passes
from spmdrl.engines.training.sharded_model import Shard
from spmdrl.engines.training.shared_prompts import RowSharing
from spmdrl.engines.training.updater import Accumulated, Updater, UpdateResult
from spmdrl.nouns.roles import Rating
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.device import Device, to_device
from spmdrl.resources.mesh import UpdateMesh
from spmdrl.runtime.supervision.activity import activity


class TrainingEngine:
    """One model's update shards and their optimizer.

    A loss function is passed with each update, so the engine has no algorithm in it. Weights are allocated when the
    engine is built and undefined until `load`. All ranks of one data rank (its pipeline, context and tensor axes) are
    given the same rows, and get the same results.
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
        rating: Rating = "logprobs",
    ):
        """Build the shards. Collective over the mesh.

        A frozen engine only scores; it has no optimizer and keeps its weights in the compute dtype, like weights beside
        adapters. Others are kept in float32. `compute_dtype` is the device's own unless given. `rating` is the head's
        output: log-probs (a policy), a value per response token (a critic) or per row (a reward model). Raises
        ValueError if the model has another head.
        """
        check_head(config, rating)
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, but log-probabilities divide by it; use one above 0")
        compute_dtype = compute_dtype or device.compute_dtype
        self.config, self.training, self.mesh, self.device = config, training, mesh, device
        self.compute_dtype = compute_dtype
        self.rating = rating
        self.weights_on_device = True
        """False while a swap holds the weights on the host, or generation reads them; computing then raises
        RuntimeError."""
        self.model = build_sharded_model(
            config,
            mesh,
            Precision(parameters=compute_dtype if frozen else torch.float32, compute=compute_dtype),
            device=device.torch_device,
            recompute=training.activation_checkpointing == "full" and not frozen,
        )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not frozen and config.updates(name))
        # A ring cuts every row into chunks of its own.
        is_ring = mesh.context.size > 1 and mesh.layout.context_kind == "ring"
        self.shares_prompts = training.share_prompts and not is_ring
        sharing = RowSharing(rating, routes=config.moe is not None) if self.shares_prompts else None
        self._passes = Passes(
            self.model, device, temperature=temperature, rating=rating, dtype=compute_dtype, sharing=sharing
        )
        self.fitted = FittedPasses(self._passes, self.model, training, device, sharing)
        self.updater: Updater | None = None
        """None in a frozen engine"""
        if not frozen:
            self.updater = Updater(self.model, optim, device, num_updates=training.num_updates)
        self.when_skipped: Callable[[TokenRows, UpdateResult], None] | None = None
        """called on every rank with its rows of a skipped update"""

    def load(self, source: WeightSource) -> None:
        """Fill the weights; each rank reads only the slices that it holds."""
        self.check_weights_present("load")
        faultpoint("load")
        for shard in self.named_shards().values():
            if shard.slice.num_elements:
                shard.tensor.copy_(source.read(shard.slice))
                activity.advance("weights read")

    def score(self, rows: TokenRows, *, temperature: float | None = None) -> Scores:
        """Rate the response tokens, by default at the engine's temperature; on the device, in row order. Collective."""
        if self.rating != "logprobs":
            raise RuntimeError("this engine has a value head, which gives no log-probs; call values, or build a policy")
        device = self.device.torch_device
        logprobs_R = torch.zeros(rows.num_response_tokens, dtype=torch.float32, device=device)
        entropy_R = torch.zeros_like(logprobs_R)
        head_of = partial(self._passes.head, temperature=temperature)
        self.check_weights_present("score")
        for members, ratings in self.fitted.rate(rows, head_of):
            index = to_device(rows.response_index(members), device)
            for found_R, rated_R in zip((logprobs_R, entropy_R), ratings, strict=True):
                found_R[index] = rated_R
        return Scores(*map(self.mesh.pipeline.sum, (logprobs_R, entropy_R)))

    def likeliest(self, rows: TokenRows, num_likeliest: int, vocab_size: int) -> Likeliest:
        """Return the likeliest tokens in each response token's place; on the device, in row order. Collective.

        At the engine's temperature, over the whole vocabulary; tokens from `vocab_size` on are excluded.
        """
        num_tokens, device = rows.num_response_tokens, self.device.torch_device
        ids_RJ = torch.zeros((num_tokens, num_likeliest), dtype=torch.int64, device=device)
        logprobs_RJ = torch.zeros((num_tokens, num_likeliest + 1), dtype=torch.float32, device=device)
        head_of = partial(self._passes.likeliest_head, num_likeliest=num_likeliest, vocab_size=vocab_size)
        self.check_weights_present("score")
        for members, ratings in self.fitted.rate(rows, head_of):
            index = to_device(rows.response_index(members), device)
            ids_RJ[index], logprobs_RJ[index] = ratings
        return Likeliest(*map(self.mesh.pipeline.sum, (ids_RJ, logprobs_RJ)))

    def values(self, rows: TokenRows) -> Tensor:
        """Return a value head's values, on the device: [R], or [B] of a reward model. Collective over the mesh."""
        if self.rating == "logprobs":
            raise RuntimeError("this engine is a policy, which has no value head; call score, or build a critic")
        by_token, device = self.rating == "token_values", self.device.torch_device
        size = rows.num_response_tokens if by_token else len(rows)
        values = torch.zeros(size, dtype=torch.float32, device=device)
        self.check_weights_present("rate")
        for members, ratings in self.fitted.rate(rows, self._passes.head):
            index = rows.response_index(members) if by_token else torch.tensor(members, dtype=torch.int64)
            values[to_device(index, device)] = ratings[0]
        return self.mesh.pipeline.sum(values)

    def update(self, rows: TokenRows, loss: LossFunction) -> UpdateResult:
        """Make one optimizer step over this rank's rows and its peers'. Collective over the mesh.

        If loss or gradient is not finite on any rank, all ranks skip the step. Gradients are freed afterwards. Raises
        ValueError, on every rank, if no rank has rows.
        """

        def attempt() -> UpdateResult:
            try:
                return self.step(self.accumulate(rows, loss))
            finally:
                self.drop_gradients()

        result = self.fitted.redone(attempt)
        if result.skipped and self.when_skipped is not None:
            self.when_skipped(rows, result)
        return result

    def accumulate(self, rows: TokenRows, loss: LossFunction) -> Accumulated:
        """Add the gradient of these rows to the weights'. Collective over the mesh; see `update`."""
        self.check_weights_present("update")
        if self.updater is None:
            raise RuntimeError("this engine is frozen, so it has no optimizer to update with; build it unfrozen")
        plan = self.fitted.plan(rows)
        if not plan:
            raise ValueError("an update needs rows on at least one data rank, but there are none; skip the update")
        micros = list(self._passes.prepare(rows, plan, self.fitted.routing_scope(rows)))
        reported: list[LossTerms] = []

        def to_scalar(micro: MicroBatch, ratings: tuple[Tensor, ...]) -> Tensor:
            if not micro.members:
                return reduce(torch.add, (0.0 * values.sum() for values in ratings))
            terms = loss(Scores(*ratings) if self.rating == "logprobs" else ratings[0], micro)
            faultpoint("forward", terms.loss)
            # Read once all are done, as reading waits for the device.
            reported.append(terms.detached())
            return terms.loss

        self._passes.train(micros, to_scalar)
        if self._passes.ran_out:
            return Accumulated([], None, len(micros), self._passes.ran_out)
        return Accumulated(
            reported if self._passes.has_ratings else [], self.fitted.router_statistics(micros), len(micros)
        )

    def step(self, accumulated: Accumulated) -> UpdateResult:
        """Agree on loss, norm and metrics, and step if they are finite. Collective over the mesh."""
        assert self.updater is not None, "a frozen engine makes no steps"
        return self.updater.step(accumulated)

    def named_shards(self) -> dict[str, Shard]:
        """Return the weights that this rank holds, by name."""
        return self.model.named_shards()

    def updates(self, weight: str) -> bool:
        return self.config.updates(weight)

    def shards_for(self, wanted: Iterable[str]) -> dict[str, Shard]:
        """Return this rank's weights for a model with `wanted` ones; collective if adapters must be merged."""
        merges = self.config.lora is not None and not any(map(is_adapter, wanted))
        return self.model.merged_shards() if merges else self.named_shards()

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight whole, adapters merged, valid until the next one. Collective: every rank must take all."""
        self.check_weights_present("gather weights")
        yield from self.model.gather_whole(self.model.merged_shards(), dtype, wanted=lambda name: not is_adapter(name))

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute with the model's own weights inside this block: the policy before its adapters were trained."""
        return unadapted(self.model.decoders)

    @property
    def update_count(self) -> int:
        """Optimizer steps made so far, without skipped ones: the policy version that generation reports."""
        return 0 if self.updater is None else self.updater.step_count

    def reshard(self) -> None:
        self.model.reshard()

    def drop_gradients(self) -> None:
        """Free remaining gradients; updates do so themselves."""
        if self.updater is not None:
            self.updater.drop_gradients()

    def optimizer_tensors(self) -> list[Tensor]:
        """Return the optimizer's means, local parts, in the order of the parameters; step counts are negligible."""
        return [tensor for means in self.optimizer_state().values() for tensor in means.values()]

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the optimizer's local means by parameter name and kind, cut like `named_shards`."""
        return {} if self.updater is None else self.updater.means()

    def check_weights_present(self, action: str) -> None:
        """Raise RuntimeError while the weights are on the host, since reading freed storage would crash, or lent."""
        if not self.weights_on_device:
            raise RuntimeError(
                f"cannot {action}: the update weights are away on the host, or lent to generation; end that first"
            )

    def sum_over_rows(self, counts: Sequence[int]) -> list[int]:
        """Return sums of host numbers over the ranks with rows of their own. Collective over the data axes."""
        return self.mesh.data.sum(torch.tensor(counts)).tolist()
