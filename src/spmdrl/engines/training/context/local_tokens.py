"""One context rank's part of a micro-batch on the device, and the way of its scores to all context ranks.

Shape letters: `T` packed tokens, `t` the places (tokens and padding) of one context rank, `R` response tokens, `p`
those that one rank predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.models.layers import Attend
from spmdrl.engines.parallel.axis_collectives import gather_own_gradient
from spmdrl.engines.training.batching.packed_rows import MicroBatch, TokenRows
from spmdrl.engines.training.context.context_parallel import attention_of
from spmdrl.engines.training.context.token_placement import Placement
from spmdrl.resources.mesh import Axis
from spmdrl.types.roles import Rating


@dataclass(frozen=True)
class OwnPredictions:
    """Which response tokens this rank predicts: a token's prediction may be made on another rank than its own place."""

    predicting_p: Tensor
    """The own places, counted from 0, whose outputs predict a response token."""
    response_p: Tensor
    """Which of the R response tokens each of them predicts."""
    counts: tuple[int, ...]
    """Response tokens that each context rank predicts."""
    order_R: Tensor
    """Where each response token stands when those of all ranks follow each other."""

    def to(self, device: torch.device) -> OwnPredictions:
        moved = (tensor.to(device) for tensor in (self.predicting_p, self.response_p, self.order_R))
        predicting_p, response_p, order_R = moved
        return OwnPredictions(predicting_p, response_p, self.counts, order_R)


@dataclass(frozen=True)
class LocalTokens:
    """What one context rank computes of a micro-batch."""

    tokens_t: Tensor
    """Token ids, 0 at padding."""
    positions_t: Tensor
    """Positions in their rows, 0 at padding."""
    row_t: Tensor
    """The row within the micro-batch, -1 at padding."""
    attend: Attend
    """For this micro-batch alone; collective over the context."""
    own: OwnPredictions
    targets_p: Tensor
    """The response tokens that this rank predicts."""
    context: Axis
    source_t: Tensor
    """The packed token at each own place, -1 at padding."""

    def own_values(self, values_T: Tensor, padding: int) -> Tensor:
        """A packed column's values at the own places."""
        at_padding = (self.source_t < 0).view(-1, *[1] * (values_T.ndim - 1))
        return values_T[self.source_t.clamp(min=0)].masked_fill_(at_padding, padding)

    @property
    def predicting_p(self) -> Tensor:
        """The own places, counted from 0, whose outputs predict a response token."""
        return self.own.predicting_p

    @property
    def response_p(self) -> Tensor:
        """Which of the R response tokens each of them predicts."""
        return self.own.response_p

    def scores_to_R(self, values_p: Tensor) -> Tensor:
        """The values [R, ...] of all response tokens in packed order, on every rank. Collective over the context.

        Backward keeps the own part, because every rank computes the same loss of all values.
        """
        if self.context.size == 1:
            return values_p
        return gather_own_gradient(values_p, self.own.counts, self.context).index_select(0, self.own.order_R)


def local_tokens(placement: Placement, rows: TokenRows, micro: MicroBatch, rating: Rating = "logprobs") -> LocalTokens:
    """This rank's part of a micro-batch. `rows` are its rows on the host, so that nothing waits for the device."""
    device = micro.tokens_T.device
    own = own_predictions(placement, rows.rated_places(rating)).to(device)
    targets_R = micro.targets_R if rating == "logprobs" else micro.tokens_T.new_empty(0)
    source_t = placement.source_P[placement.own_t].to(device)
    return LocalTokens(
        tokens_t=_own_values(micro.tokens_T, placement, source_t),
        positions_t=_own_values(micro.positions_T, placement, source_t),
        row_t=placement.row_t.to(device),
        attend=attention_of(placement, device),
        own=own,
        targets_p=targets_R if placement.context.size == 1 or rating != "logprobs" else targets_R[own.response_p],
        context=placement.context,
        source_t=source_t,
    )


def own_predictions(placement: Placement, predicting_R: Tensor) -> OwnPredictions:
    """Who rates which of these packed tokens, on the host."""
    places_R = placement.place_T[predicting_R]
    owner_R = placement.owner_P[places_R]
    response_p = (owner_R == placement.context.rank).nonzero().flatten()
    by_owner = owner_R.argsort(stable=True)
    order_R = torch.empty_like(by_owner)
    order_R[by_owner] = torch.arange(len(by_owner))
    return OwnPredictions(
        predicting_p=torch.searchsorted(placement.own_t, places_R[response_p]),
        response_p=response_p,
        counts=tuple(owner_R.bincount(minlength=placement.context.size).tolist()),
        order_R=order_R,
    )


def _own_values(values_T: Tensor, placement: Placement, source_t: Tensor) -> Tensor:
    """The values at this rank's places, 0 at padding."""
    if placement.is_identity:
        return values_T
    return values_T[source_t.clamp(min=0)].masked_fill_(source_t < 0, 0)
