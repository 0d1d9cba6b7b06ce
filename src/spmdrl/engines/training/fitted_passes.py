"""Passes of rows in micro-batches that fit the memory, with half the tokens each after a rank ran out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import row_cost_of
from spmdrl.engines.training.microbatch import MemoryRanOut, MicrobatchLimit, plan_microbatches
from spmdrl.engines.training.packed_rows import MicroBatch, TokenRows
from spmdrl.engines.training.passes import HeadOf, Passes
from spmdrl.engines.training.routers import RouterStatistics, RoutingScope
from spmdrl.engines.training.sharded_model import ShardedModel
from spmdrl.engines.training.shared_prompts import RowSharing, bundle_rows
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.device import Device

Made = TypeVar("Made")
Rated = tuple[Sequence[int], tuple[Tensor, ...]]
"""Members of a micro-batch, and their ratings."""


class FittedPasses:
    """Passes over planned micro-batches, which are repeated if some rank ran out of memory."""

    def __init__(
        self, passes: Passes, model: ShardedModel, training: TrainingConfig, device: Device, sharing: RowSharing | None
    ):
        self.limit = MicrobatchLimit(training.tokens_per_microbatch(device.kind))
        """may be shared with other engines"""
        self.passes = passes
        self._model = model
        self._mesh = model.mesh
        self._config = model.config
        self._training = training
        self._device = device
        self._sharing = sharing
        self._row_cost = row_cost_of(model.config)

    def plan(self, rows: TokenRows) -> list[list[int]]:
        """Return the rows of each micro-batch, equally many on every rank. Collective over the data axes."""
        # Context ranks share each row's tokens, so together they have that many times the budget.
        max_tokens = self.limit.tokens * self._mesh.context.size
        bundles = bundle_rows(rows, self._row_cost, max_tokens=max_tokens, sharing=self._sharing)
        plan = plan_microbatches(
            [bundle.num_tokens for bundle in bundles],
            [bundle.cost for bundle in bundles],
            max_tokens=max_tokens,
            agree=lambda count: int(self._mesh.data.max(torch.tensor([count]))),
        )
        return [[row for number in members for row in bundles[number].rows] for members in plan]

    def rate(self, rows: TokenRows, head_of: HeadOf) -> list[Rated]:
        """Rate rows on the device, micro-batch by micro-batch; none on ranks without the head. Collective.

        Returned together, since reading one micro-batch's would wait for the device before the next is queued.
        """
        return self.redone(lambda: self._rated(rows, head_of))

    def _rated(self, rows: TokenRows, head_of: HeadOf) -> list[Rated]:
        plan = self.plan(rows)
        scope = self.routing_scope(rows) if plan and rows.experts_TLC is not None else None
        return self._evaluated(self.passes.prepare(rows, plan, scope), head_of) if plan else []

    def redone(self, attempt: Callable[[], Made]) -> Made:
        """Repeat an attempt with half the tokens per micro-batch if a rank ran out of memory."""
        while True:
            self.passes.ran_out = ""
            try:
                return attempt()
            except MemoryRanOut as failure:
                self.limit.halve(failure)
            # Outside the block, which holds the pass's results so far.
            self._device.empty_cache()

    def _evaluated(self, micros: Iterable[MicroBatch], head_of: HeadOf) -> list[Rated]:
        found: list[Rated] = []

        def collect(micro: MicroBatch, ratings: tuple[Tensor, ...]) -> None:
            faultpoint("score")
            found.append((micro.members, ratings))

        self.passes.evaluate(micros, collect, head_of)
        self._agree_on_memory()
        return found

    def _agree_on_memory(self) -> None:
        """Raise MemoryRanOut on every rank if one ran out and is still in step. Collective over the data axes."""
        words = self.passes.ran_out
        if self._model.forwards_alone and self._mesh.data.max(torch.tensor([bool(words)], dtype=torch.int32)):
            who = f"rank {self._mesh.rank}" if words else "another rank"
            raise MemoryRanOut(f"{who} ran out of memory: {words or 'see its words'}")

    def routing_scope(self, rows: TokenRows) -> RoutingScope | None:
        """Return totals shared by the routers of one update. Collective over the data axes."""
        if self._config.moe is None:
            return None
        num_rows = int(self._mesh.data.sum(torch.tensor([len(rows)])))
        return RoutingScope(self._config, self._training.routing, num_rows, self._mesh.context, self._mesh.tensor)

    def router_statistics(self, micros: Sequence[MicroBatch]) -> RouterStatistics | None:
        """Return the metrics of the routers in an update."""
        if self._config.moe is None:
            return None
        statistics = RouterStatistics(self._config, self._training.routing, self._device.torch_device)
        for micro in micros:
            assert micro.route is not None, "the routers' choices of an update are always recorded"
            statistics.add(micro.route)
        return statistics
