"""Forward and backward passes of micro-batches through the stages of the model that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.models.kernels.plain import LEAST_ROWS
from spmdrl.engines.parallel.tensor_parallel import sum_tensor_gradients
from spmdrl.engines.parallel.weight_cuts import VocabularyPart
from spmdrl.engines.training.context.context_parallel import at_places, share_of
from spmdrl.engines.training.context.token_placement import num_places, place_tokens
from spmdrl.engines.training.heads import LikeliestHead, LogprobHead, TokenHead, ValueHead
from spmdrl.engines.training.packed_rows import MicroBatch, SharedLayout, TokenRows, dummy_rows, to_microbatch
from spmdrl.engines.training.pipeline_runner import PipelineRunner, sum_tied_gradients
from spmdrl.engines.training.routers import RecordingRoute, RoutedTokens, RoutingScope
from spmdrl.engines.training.sharded_model import ShardedModel, local_gradients, sum_gradients
from spmdrl.engines.training.shared_prompts import RowSharing, lay_out
from spmdrl.nouns.roles import Rating
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.device import Device, to_device
from spmdrl.resources.memory import is_out_of_memory
from spmdrl.runtime.supervision.activity import activity

ToScalar = Callable[[MicroBatch, tuple[Tensor, ...]], Tensor]
"""The last stage's scalar from a micro-batch and its head's ratings, from which backward starts."""
HeadOf = Callable[[MicroBatch], TokenHead]
"""The head of a micro-batch."""
Collect = Callable[[MicroBatch, tuple[Tensor, ...]], None]
"""Receives a micro-batch's ratings."""


class Passes:
    """Runner of the stages of one model; every rank of the mesh runs as many micro-batches, in the same order."""

    def __init__(
        self,
        model: ShardedModel,
        device: Device,
        *,
        temperature: float,
        rating: Rating,
        dtype: torch.dtype,
        sharing: RowSharing | None,
    ):
        """`dtype` is that of hidden states between pipeline stages.

        With `sharing`, rows of a micro-batch compute their common tokens once.
        """
        self._model = model
        self._mesh = model.mesh
        self._device = device.torch_device
        self._temperature = temperature
        self._softcap = model.config.logit_softcap
        self._rating = rating
        self._dtype = dtype
        self._sharing = sharing
        self._vocabulary = None
        if self._mesh.tensor.size > 1:
            self._vocabulary = VocabularyPart.of(model.config.vocab_size, self._mesh.tensor)
        self.ran_out = ""
        """the allocator's message, from this rank's running out of memory until the pass restarts"""
        self._pipeline: PipelineRunner | None = None
        if self._mesh.pipeline.size > 1:
            self._pipeline = PipelineRunner(model.stages, self._mesh.pipeline, self._mesh.layout, self._device)

    @property
    def has_ratings(self) -> bool:
        """True if this rank reports the micro-batches' results: it has the head, and reports for its copies."""
        holds_head = any(decoder.span.heads for decoder in self._model.decoders)
        return holds_head and self._mesh.tensor.rank == 0 and self._mesh.context.rank == 0

    def prepare(
        self, rows: TokenRows, plan: Sequence[list[int]], scope: RoutingScope | None = None
    ) -> Iterator[MicroBatch]:
        """Move micro-batches to the device, one by one as they are taken; with a scope, their routing is recorded."""
        # Pipeline stages exchange hidden states of one shape.
        size = None
        if self._pipeline and plan:
            size = max(self._size(_offsets(*self._laid_out(rows, members))) for members in plan)
        for members in plan:
            yield self._standing_in(partial(self._prepared, rows, members, size, scope), self._dummy)

    def _prepared(
        self, rows: TokenRows, members: Sequence[int], size: int | None, scope: RoutingScope | None
    ) -> MicroBatch:
        chosen, layout = self._laid_out(rows, members)
        whole = to_microbatch(chosen, members, self._device, self._rating, layout)
        micro = self._placed(whole, chosen, layout, size)
        return micro if scope is None else replace(micro, route=_recording_route(scope, chosen, micro))

    def _dummy(self) -> MicroBatch:
        return self._prepared(dummy_rows(), [], None, None)

    def evaluate(self, micros: Iterable[MicroBatch], collect: Collect, head_of: HeadOf) -> None:
        """Run forward without a gradient, and call `collect` on the ranks that hold the head.

        Collective over the mesh.
        """

        def to_scalar(micro: MicroBatch, ratings: tuple[Tensor, ...]) -> Tensor:
            collect(micro, ratings)
            return ratings[0].new_zeros(())

        with torch.no_grad(), self._leaving_shards():
            if self._pipeline is None:
                for micro in micros:
                    self._forward(micro, to_scalar, head_of)
            else:
                self._through_pipeline(self._pipeline.evaluate, list(micros), to_scalar, head_of)

    def train(self, micros: Iterable[MicroBatch], to_scalar: ToScalar) -> None:
        """Add every micro-batch's gradient to the weights'. Collective over the mesh."""
        with self._leaving_shards():
            if self._pipeline is None:
                for micro, is_last in _marking_the_last(micros):
                    self._model.begin_microbatch(is_last=is_last)
                    self._backward(self._forward(micro, to_scalar, self.head))
            else:
                self._through_pipeline(self._pipeline.train, list(micros), to_scalar, self.head)
        self._sum_copies()
        activity.advance("gradients")

    def _forward(self, micro: MicroBatch, to_scalar: ToScalar, head_of: HeadOf) -> Tensor:
        """Run a micro-batch forward through a model of one stage."""

        def run(micro: MicroBatch) -> Tensor:
            return self._run(self._model.stages[0], None, micro, to_scalar, head_of)

        return self._standing_in(lambda: run(micro), lambda: run(self._dummy()))

    def _standing_in(self, real: Callable[[], Any], dummy: Callable[[], Any]) -> Any:
        """Call `real`, or the dummy once this rank has run out of memory, so that it stays in step with the others."""
        if not self.ran_out:
            try:
                return real()
            except (MemoryError, RuntimeError) as error:
                if not (self._model.forwards_alone and is_out_of_memory(error)):
                    raise
                self._note_out(error)
        return dummy()

    def _backward(self, scalar: Tensor) -> None:
        try:
            faultpoint("backward")
            scalar.backward()
            activity.advance("backward passes")
        except (MemoryError, RuntimeError) as error:
            # Once some gradients are with other ranks, they can't be kept in step any more.
            if not (self._model.is_plain and is_out_of_memory(error)):
                raise
            self._note_out(error)

    def _note_out(self, error: BaseException) -> None:
        # The message only: the error itself refers to all that the pass holds.
        self.ran_out = (str(error) or "no more memory").splitlines()[0]

    @contextmanager
    def _leaving_shards(self) -> Iterator[None]:
        """Reshard afterwards: gathered weights may stay for a pass, but an optimizer step outdates them."""
        try:
            yield
        finally:
            self._model.reshard()

    def _through_pipeline(
        self, run: Callable[..., Any], micros: list[MicroBatch], to_scalar: ToScalar, head_of: HeadOf
    ) -> None:
        def compute(stage: Decoder, inputs: Tensor, microbatch: int) -> Tensor:
            return self._run(stage, inputs, micros[microbatch], to_scalar, head_of)

        num_tokens = micros[0].tokens_T.numel() // self._mesh.tensor.size
        run(len(micros), (num_tokens, self._model.config.hidden_size), self._dtype, compute)

    def _run(
        self, stage: Decoder, inputs: Tensor | None, micro: MicroBatch, to_scalar: ToScalar, head_of: HeadOf
    ) -> Tensor:
        """Run one stage forward: returns hidden states for the next stage, or the last one's scalar."""
        activity.advance("micro-batches")
        first = micro.tokens_T if stage.span.embeds else inputs
        out: Any = stage(first, micro.positions_T, micro.attend, head_of(micro), micro.route)
        if not stage.span.heads:
            return out
        return to_scalar(micro, out if micro.gather_R is None else tuple(map(micro.gather_R, out)))

    def head(self, micro: MicroBatch, temperature: float | None = None) -> TokenHead:
        """Return the model's own head, at its own temperature unless another is given."""
        if micro.targets_P is None:
            return ValueHead(micro.places_P, self._mesh.tensor, micro.copies)
        temperature = self._temperature if temperature is None else temperature
        return LogprobHead(micro.places_P, micro.targets_P, self._vocabulary, temperature, self._softcap, micro.copies)

    def likeliest_head(self, micro: MicroBatch, num_likeliest: int, vocab_size: int) -> TokenHead:
        """Return a head that finds the likeliest tokens of the first `vocab_size` after each place."""
        return LikeliestHead(
            micro.places_P, num_likeliest, vocab_size, self._vocabulary, self._temperature, self._softcap, micro.copies
        )

    def _laid_out(self, rows: TokenRows, members: Sequence[int]) -> tuple[TokenRows, SharedLayout | None]:
        chosen = rows.select(members) if members else dummy_rows()
        return chosen, None if self._sharing is None else lay_out(chosen, self._sharing)

    def _size(self, offsets: Tensor) -> int:
        """Return tokens and padding of all context ranks; each rank's are a multiple of the tensor axis's size.

        At least the number from which a CPU's matrix product rounds tokens uniformly.
        """
        context, tensor, kind = self._mesh.context.size, self._mesh.tensor.size, self._mesh.layout.context_kind
        fewest = int(offsets[-1]) if context == 1 else num_places(offsets, context, kind)
        return -(-max(fewest, LEAST_ROWS) // (context * tensor)) * (context * tensor)

    def _placed(self, micro: MicroBatch, rows: TokenRows, layout: SharedLayout | None, size: int | None) -> MicroBatch:
        """Return the micro-batch as this rank runs it: whole, unless context ranks share its tokens or it is padded."""
        offsets = _offsets(rows, layout)
        size = size or self._size(offsets)
        if self._mesh.context.size == 1 and size == offsets[-1]:
            return micro
        placement = place_tokens(offsets, self._mesh.context, self._mesh.layout.context_kind, size=size)
        places = rows.rated_places(self._rating)
        return share_of(micro, places if layout is None else layout.place_A[places], placement)

    def _sum_copies(self) -> None:
        """Sum the gradients of weights that several ranks hold, of which each has a part. Collective."""
        mesh, model = self._mesh, self._model
        if model.is_replica:
            sum_gradients([one for _, one in model.named_parameters() if one.requires_grad], mesh.data)
        if mesh.tensor.size > 1:
            for number, decoder in model.stages.items():
                gradients = local_gradients(decoder.named_parameters())
                sum_tensor_gradients(gradients, model.parts[number], mesh.tensor)
        if model.config.tied_head and mesh.pipeline.size > 1:
            sum_tied_gradients(model.tied_gradients(), mesh.pipeline)


def _marking_the_last(micros: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    for micro, following in pairwise(chain(micros, (None,))):
        assert micro is not None
        yield micro, following is None


def _recording_route(scope: RoutingScope, rows: TokenRows, micro: MicroBatch) -> RecordingRoute:
    """Return the route of one micro-batch's own tokens; dummy rows don't count."""
    device = micro.row_T.device
    row_T = micro.row_T if micro.members else torch.full_like(micro.row_T, -1)
    experts_LTC = None
    if rows.experts_TLC is not None:
        experts_TLC = to_device(rows.experts_TLC, device)
        if micro.source_T is not None:
            experts_TLC = at_places(experts_TLC, micro.source_T, padding=-1)
        experts_LTC = experts_TLC.transpose(0, 1)
    lengths_B = to_device(rows.lengths_B, device)
    return RecordingRoute(scope, RoutedTokens(row_T, lengths_B, experts_LTC, micro.segments_BS))


def _offsets(rows: TokenRows, layout: SharedLayout | None) -> Tensor:
    """Return offsets of the pieces that may be padded: rows, or all tokens together if rows share some."""
    return rows.offsets if layout is None else torch.tensor([0, layout.source_T.numel()])
