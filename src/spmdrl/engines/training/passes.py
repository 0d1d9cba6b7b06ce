"""Takes micro-batches forward and backward through the stages of the model that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.models.kernels.plain import LEAST_ROWS
from spmdrl.engines.parallel.vocabulary import VocabularyPart
from spmdrl.engines.training.batching.microbatch import dummy_rows
from spmdrl.engines.training.batching.packed_rows import MicroBatch, Scores, TokenRows, Values, to_microbatch
from spmdrl.engines.training.context.local_tokens import LocalTokens, local_tokens
from spmdrl.engines.training.context.token_placement import place_tokens, placed_size
from spmdrl.engines.training.heads import LogprobHead, TokenHead, ValueHead
from spmdrl.engines.training.pipeline.pipeline_runner import PipelineRunner
from spmdrl.engines.training.routing.routers import RecordingRoute, RoutedTokens, RoutingScope
from spmdrl.engines.training.sharding.sharded_model import ShardedModel
from spmdrl.resources.device import Device
from spmdrl.types.roles import Rating

Finish = Callable[["Work", "Scores | Values"], Tensor]
"""What the last stage makes of a micro-batch's ratings: the scalar from which backward starts."""


@dataclass(frozen=True)
class Work:
    """One micro-batch on its way through the stages of this rank."""

    members: list[int]
    """Its rows among those given; none for a dummy that keeps other ranks company."""
    micro: MicroBatch
    local: LocalTokens
    route: RecordingRoute | None
    temperature: float


class Passes:
    """Runs the stages of one model; every rank of the mesh runs as many micro-batches, in the same order."""

    def __init__(self, model: ShardedModel, device: Device, *, temperature: float, rating: Rating, dtype: torch.dtype):
        """`dtype` is that of the hidden states that pipeline stages hand on."""
        self.model = model
        self._mesh = model.mesh
        self.device = device
        self._temperature = temperature
        self.rating = rating
        self._dtype = dtype
        self._vocabulary = VocabularyPart.of(model.config.vocab_size, self._mesh.tensor)
        self._pipeline: PipelineRunner | None = None
        if self._mesh.pipeline.size > 1:
            self._pipeline = PipelineRunner(model.stages, self._mesh.pipeline, self._mesh.layout, device.torch_device)

    @property
    def has_ratings(self) -> bool:
        """Whether this rank is to report what the micro-batches gave: it holds the head, and reports for its copies."""
        holds_head = any(decoder.span.heads for decoder in self.model.decoders)
        return holds_head and self._mesh.tensor.rank == 0 and self._mesh.context.rank == 0

    def prepare(
        self,
        rows: TokenRows,
        plan: Sequence[list[int]],
        scope: RoutingScope | None = None,
        *,
        temperature: float | None = None,
    ) -> Iterator[Work]:
        """Move micro-batches to the device, one by one as they are asked for; with a scope, their routing is kept.

        They are rated at the model's own temperature unless another is given.
        """
        temperature = self._temperature if temperature is None else temperature
        # Pipeline stages hand on hidden states of one shape.
        size = max(self._placed_size(_rows_of(rows, members)) for members in plan) if self._pipeline and plan else None
        for members in plan:
            chosen = _rows_of(rows, members)
            micro = to_microbatch(chosen, self.device.torch_device)
            placement = place_tokens(
                chosen.offsets, self._mesh.context, self._mesh.layout.context_kind,
                multiple=self._mesh.tensor.size, num_tokens=size or self._placed_size(chosen),
            )  # fmt: skip
            local = local_tokens(placement, chosen, micro, self.rating)
            route = None if scope is None else _recording_route(scope, chosen, local, is_real=bool(members))
            yield Work(members, micro, local, route, temperature)

    def evaluate(self, works: Iterable[Work], see: Callable[[Work, Scores | Values], None]) -> None:
        """Run forward without a gradient, and show the ratings where the head is held. Collective over the mesh."""

        def finish(work: Work, ratings: Scores | Values) -> Tensor:
            see(work, ratings)
            return ratings.tensors[0].new_zeros(())

        with torch.no_grad():
            if self._pipeline is None:
                for work in works:
                    self._run(self.model.stages[0], None, work, finish)
            else:
                self._through_pipeline(self._pipeline.evaluate, list(works), finish)

    def train(self, works: Iterable[Work], finish: Finish) -> None:
        """Add every micro-batch's gradient to the weights'. Collective over the mesh."""
        if self._pipeline is None:
            for work in works:
                self._run(self.model.stages[0], None, work, finish).backward()
        else:
            self._through_pipeline(self._pipeline.train, list(works), finish)

    def _through_pipeline(self, run: Callable[..., Any], works: list[Work], finish: Finish) -> None:
        def compute(stage: Decoder, inputs: Tensor, microbatch: int) -> Tensor:
            return self._run(stage, inputs, works[microbatch], finish)

        num_tokens = works[0].local.tokens_t.numel() // self._mesh.tensor.size
        run(len(works), (num_tokens, self.model.config.hidden_size), self._dtype, compute)

    def _run(self, stage: Decoder, inputs: Tensor | None, work: Work, finish: Finish) -> Tensor:
        """One stage's forward: hidden states for the next stage, or the scalar that the last one ends in."""
        local = work.local
        first = local.tokens_t if stage.span.embeds else inputs
        out: Any = stage(first, local.positions_t, local.attend, self._head(work), work.route)
        if not stage.span.heads:
            return out
        whole = [local.scores_to_R(values_p) for values_p in out]
        ratings = Scores(*whole) if self.rating == "logprobs" else Values(*whole)
        return finish(work, ratings)

    def _head(self, work: Work) -> TokenHead:
        if self.rating == "logprobs":
            return LogprobHead(work.local.predicting_p, work.local.targets_p, self._vocabulary, work.temperature)
        return ValueHead(work.local.predicting_p, self._mesh.tensor)

    def _placed_size(self, rows: TokenRows) -> int:
        """No fewer places than a CPU's matrix product needs to round a token as it does among many."""
        layout = self._mesh.layout
        unit = layout.context * layout.tensor
        fewest = placed_size(rows.offsets, layout.context, layout.context_kind, layout.tensor)
        return max(fewest, -(-LEAST_ROWS // unit) * unit)


def _recording_route(scope: RoutingScope, rows: TokenRows, local: LocalTokens, *, is_real: bool) -> RecordingRoute:
    """The route of one micro-batch's own tokens; rows that a rank makes up count nowhere."""
    device = local.row_t.device
    row_t = local.row_t if is_real else torch.full_like(local.row_t, -1)
    experts_LtC = None
    if rows.experts_TLC is not None:
        experts_LtC = local.own_values(rows.experts_TLC.to(device), padding=-1).transpose(0, 1)
    return RecordingRoute(scope, RoutedTokens(row_t, rows.lengths_B.to(device), experts_LtC))


def _rows_of(rows: TokenRows, members: list[int]) -> TokenRows:
    return rows.select(members) if members else dummy_rows()
