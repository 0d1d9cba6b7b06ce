"""Passes of rows in micro-batches that fit the memory: half as many tokens each where a rank ran out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from spmdrl.engines.models.layers import Attend
from spmdrl.engines.models.lora import adapting
from spmdrl.engines.models.row_cost import row_cost_of
from spmdrl.engines.training.heads import TokenHead
from spmdrl.engines.training.microbatch import MemoryRanOut, MicrobatchLimit, plan_microbatches
from spmdrl.engines.training.packed_rows import AdapterLogprobs, MicroBatch, TokenRows
from spmdrl.engines.training.passes import HeadOf, Passes
from spmdrl.engines.training.routers import RouterStatistics, RoutingScope
from spmdrl.engines.training.sharded_model import ShardedModel
from spmdrl.engines.training.shared_prompts import RowBundle, RowSharing, bundle_rows
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.device import Device, to_device

Made = TypeVar("Made")
Rated = tuple[Sequence[int], tuple[Tensor, ...]]
"""The members of a micro-batch, and their ratings."""


def twice(micro: MicroBatch) -> MicroBatch:
    """Two copies of a micro-batch's tokens, one behind the other, of which only the first meets the adapters.

    Each is attended to and rated as the micro-batch alone is; places and targets stay those of one.
    """
    return replace(
        micro,
        tokens_T=micro.tokens_T.repeat(2),
        positions_T=micro.positions_T.repeat(2),
        row_T=micro.row_T.repeat(2),
        attend=AttendTwice(micro.attend),
    )


@dataclass(frozen=True)
class AttendTwice:
    """Attention inside each copy."""

    attend: Attend
    """Of one copy."""

    def __call__(self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor) -> Tensor:
        copies = zip(q_THK.chunk(2), k_TJK.chunk(2), v_TJU.chunk(2), strict=True)
        return torch.cat([self.attend(layer, *heads) for heads in copies])


@dataclass(frozen=True)
class RateTwice:
    """The ratings of the first copy, then those of the second."""

    head: TokenHead
    """Of one copy."""

    def __call__(self, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        first, second = (self.head(hidden, weight_VD) for hidden in hidden_TD.chunk(2))
        return *first, *second


class FittedPasses:
    """Plans micro-batches of rows, rates them, and does a pass anew that ran out of memory on some rank."""

    def __init__(
        self, passes: Passes, model: ShardedModel, training: TrainingConfig, device: Device, sharing: RowSharing | None
    ):
        self.limit = MicrobatchLimit(training.tokens_per_microbatch(device.kind))
        """may be shared with other engines"""
        self._passes = passes
        self._model = model
        self._mesh = model.mesh
        self._config = model.config
        self._training = training
        self._device = device
        self._sharing = sharing
        self._row_cost = row_cost_of(model.config)

    def plan(self, rows: TokenRows) -> list[list[int]]:
        """The rows of each micro-batch, as many on every rank. Collective over the data axes."""
        # Context ranks share each row's tokens, so together they have that many times the budget.
        max_tokens = self.limit.tokens * self._mesh.context.size
        bundles = self._bundles(rows, max_tokens)
        plan = plan_microbatches(
            [bundle.num_tokens for bundle in bundles],
            [bundle.cost for bundle in bundles],
            max_tokens=max_tokens,
            agree=lambda count: int(self._mesh.data.max(torch.tensor([count]))),
        )
        return [[row for number in members for row in bundles[number].rows] for members in plan]

    def _bundles(self, rows: TokenRows, max_tokens: int) -> list[RowBundle]:
        return bundle_rows(rows, self._row_cost, max_tokens=max_tokens, sharing=self._sharing)

    def rate(self, rows: TokenRows, head_of: HeadOf) -> list[Rated]:
        """Rate rows on the device, micro-batch by micro-batch; none on ranks without the head. Collective.

        All of them, since reading those of one micro-batch would wait for the device before the next is queued.
        """
        return self.redone(lambda: self._rated(rows, head_of))

    def _rated(self, rows: TokenRows, head_of: HeadOf) -> list[Rated]:
        plan = self.plan(rows)
        scope = self.routing_scope(rows) if plan and rows.experts_TLC is not None else None
        return self._evaluated(self._passes.prepare(rows, plan, scope), head_of) if plan else []

    def rate_twice(self, rows: TokenRows) -> AdapterLogprobs | None:
        """Rate rows with and without adapters in one pass over each row twice. Collective.

        None where that isn't one micro-batch on every rank, so that two passes take no longer.
        """
        return self.redone(lambda: self._rated_twice(rows))

    def _rated_twice(self, rows: TokenRows) -> AdapterLogprobs | None:
        plan = self._plan_of_twice(rows)
        if plan is None:
            return None
        with_R = torch.zeros(rows.num_response_tokens, dtype=torch.float32, device=self._device.torch_device)
        without_R = torch.zeros_like(with_R)
        with adapting(self._model.decoders, "first half"):
            micros = map(twice, self._passes.prepare(rows, plan))
            found = self._evaluated(micros, lambda micro: RateTwice(self._passes.head(micro)))
        for members, (adapted_R, _, own_R, _) in found:
            index = to_device(rows.response_index(members), with_R.device)
            with_R[index], without_R[index] = adapted_R, own_R
        return AdapterLogprobs(with_R, without_R)

    def _plan_of_twice(self, rows: TokenRows) -> list[list[int]] | None:
        """All rows in one micro-batch if twice its tokens keep the budget on every rank; else None. Collective.

        Of more micro-batches a pass over each row twice has as many as two passes, and saves nothing. None also where
        other ranks have a part of a row or its layers.
        """
        if self._mesh.model.size > 1:
            return None
        bundles = self._bundles(rows, self.limit.tokens // 2)
        own_tokens = sum(bundle.num_tokens for bundle in bundles)
        most_tokens = int(self._mesh.data.max(torch.tensor([own_tokens])))
        if 2 * most_tokens > self.limit.tokens:
            return None
        return [[row for bundle in bundles for row in bundle.rows]] if most_tokens else []

    def redone(self, attempt: Callable[[], Made]) -> Made:
        """Repeat an attempt with half the tokens per micro-batch where a rank ran out of memory."""
        while True:
            self._passes.ran_out = ""
            try:
                return attempt()
            except MemoryRanOut as failure:
                self.limit.halve(failure)
            # Behind the block, which holds what the pass had reached.
            self._device.empty_cache()

    def _evaluated(self, micros: Iterable[MicroBatch], head_of: HeadOf) -> list[Rated]:
        found: list[Rated] = []

        def collect(micro: MicroBatch, ratings: tuple[Tensor, ...]) -> None:
            faultpoint("score")
            found.append((micro.members, ratings))

        self._passes.evaluate(micros, collect, head_of)
        self._agree_on_memory()
        return found

    def _agree_on_memory(self) -> None:
        """Raise MemoryRanOut on every rank where one ran out and is still in step. Collective over the data axes."""
        words = self._passes.ran_out
        if self._model.forwards_alone and self._mesh.data.max(torch.tensor([bool(words)], dtype=torch.int32)):
            who = f"rank {self._mesh.rank}" if words else "another rank"
            raise MemoryRanOut(f"{who} ran out of memory: {words or 'see its words'}")

    def routing_scope(self, rows: TokenRows) -> RoutingScope | None:
        """Totals that the routers of one update share. Collective over the data axes."""
        if self._config.moe is None:
            return None
        num_rows = int(self._mesh.data.sum(torch.tensor([len(rows)])))
        return RoutingScope(self._config, self._training.routing, num_rows, self._mesh.context, self._mesh.tensor)

    def router_statistics(self, micros: Sequence[MicroBatch]) -> RouterStatistics | None:
        """Metrics of the routers in an update."""
        if self._config.moe is None:
            return None
        statistics = RouterStatistics(self._config, self._training.routing, self._device.torch_device)
        for micro in micros:
            assert micro.route is not None, "the routers' choices of an update are always recorded"
            statistics.add(micro.route)
        return statistics
