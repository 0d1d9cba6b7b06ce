"""A training engine's inputs and outputs: packed rows, scores and loss terms.

Shape letters: `B` rows, `T` packed tokens, `R` packed response tokens of those rows, `P` places to rate, `J` further
tokens that are rated in each place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.kernels.prefixed import Copies
from spmdrl.engines.models.layers import Mix, PackedCausalAttention
from spmdrl.engines.training.routers import RecordingRoute
from spmdrl.nouns.batch import gather_ragged_rows, offsets_of
from spmdrl.nouns.roles import Rating
from spmdrl.resources.device import to_device

OTHER_TOKENS = "other_tokens"
"""A column of token ids [R, J]: further tokens, which the head rates in the place of each response token."""


@dataclass(frozen=True)
class TokenRows:
    """Packed rows on the host: each is a prompt of at least one token, then a response of any length.

    `R` counts the response tokens that the model wrote: all of them, or those of `is_model_T`.
    """

    tokens_T: Tensor
    """Token ids, int64."""
    offsets: Tensor
    """[B + 1]: row b holds `tokens_T[offsets[b]:offsets[b + 1]]`."""
    prompt_lengths_B: Tensor
    """Given tokens of each row, which aren't learned."""
    response: dict[str, Tensor] = field(default_factory=dict)
    """Values per response token, packed over rows [R, ...]."""
    experts_TLC: Tensor | None = None
    """Experts that each token must use in each sparse layer, -1 for the router's choice."""
    is_model_T: Tensor | None = None
    """bool: tokens by the model, if an environment wrote others after the prompt; None: all after it."""
    unit_size: int = 1
    """Number of consecutive rows that a loss takes together, so that they must share a micro-batch."""

    def __post_init__(self) -> None:
        num_rows, num_tokens = self.offsets.numel() - 1, self.tokens_T.numel()
        if num_rows < 0 or int(self.offsets[-1]) != num_tokens or self.prompt_lengths_B.shape != (num_rows,):
            raise ValueError(
                f"{num_tokens} tokens, offsets {self.offsets.tolist()[:1]}..{self.offsets.tolist()[-1:]} and "
                f"{self.prompt_lengths_B.numel()} prompt lengths don't describe the same rows; "
                "offsets start at 0, end at the number of tokens and number one more than the rows"
            )
        if num_rows % self.unit_size:
            raise ValueError(f"{num_rows} rows aren't whole units of {self.unit_size}; pass all rows of each unit")
        wrong = (self.prompt_lengths_B < 1) | (self.prompt_lengths_B > self.lengths_B)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"row {row} has a prompt of {int(self.prompt_lengths_B[row])} tokens in {int(self.lengths_B[row])}, "
                "but the first response token needs at least one token before it; begin the row with a prompt token"
            )
        self._check_is_model()
        expected = self.num_response_tokens
        for name, values in self.response.items():
            if values.shape[:1] != (expected,):
                raise ValueError(f"column {name!r} holds {values.shape[0]} values, but these rows need {expected}")

    def _check_is_model(self) -> None:
        if self.is_model_T is None:
            return
        if self.is_model_T.shape != self.tokens_T.shape:
            raise ValueError(
                f"is_model_T has {self.is_model_T.numel()} values, but these rows have {self.tokens_T.numel()} tokens"
            )
        positions_T = torch.arange(self.tokens_T.numel()) - self.offsets[:-1].repeat_interleave(self.lengths_B)
        if bool((self.is_model_T & (positions_T < self.prompt_lengths_B.repeat_interleave(self.lengths_B))).any()):
            raise ValueError("is_model_T marks prompt tokens, but the model only writes after the prompt")

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths_B(self) -> Tensor:
        return self.offsets.diff()

    @property
    def response_offsets(self) -> Tensor:
        """[B + 1] offsets of rows among the R packed response tokens."""
        if self.is_model_T is not None:
            return offsets_of(self.is_model_T)[self.offsets]
        return offsets_of(self.lengths_B - self.prompt_lengths_B)

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_offsets[-1])

    def rated_places(self, rating: Rating) -> Tensor:
        """Return the packed token before each response token [R], or the last one of each row [B]."""
        if rating == "row_values":
            return self.offsets[1:] - 1
        if self.is_model_T is not None:
            return self.is_model_T.nonzero().squeeze(1) - 1
        bounds = self.response_offsets
        shift_B = self.offsets[:-1] + self.prompt_lengths_B - 1 - bounds[:-1]
        return torch.arange(int(bounds[-1])) + shift_B.repeat_interleave(bounds.diff())

    def targets_at(self, places_P: Tensor) -> Tensor:
        """Return the tokens to rate after the places of log-probs: [P], or [P, 1 + J] with others."""
        next_P = self.tokens_T[places_P + 1]
        others_PJ = self.response.get(OTHER_TOKENS)
        return next_P if others_PJ is None else torch.cat((next_P[:, None], others_PJ), 1)

    def select(self, rows: Sequence[int] | Tensor) -> TokenRows:
        """Copy the rows at these positions, whole units, in that order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        tokens_T, offsets = gather_ragged_rows(self.tokens_T, self.offsets, index)
        bounds = self.response_offsets
        return TokenRows(
            tokens_T=tokens_T,
            offsets=offsets,
            prompt_lengths_B=self.prompt_lengths_B[index],
            response={name: gather_ragged_rows(values, bounds, index)[0] for name, values in self.response.items()},
            experts_TLC=(
                None if self.experts_TLC is None else gather_ragged_rows(self.experts_TLC, self.offsets, index)[0]
            ),
            is_model_T=(
                None if self.is_model_T is None else gather_ragged_rows(self.is_model_T, self.offsets, index)[0]
            ),
            unit_size=self.unit_size,
        )

    def response_index(self, rows: Sequence[int]) -> Tensor:
        """Return the indexes of `select(rows)`'s response tokens among this object's R packed ones."""
        every = torch.arange(self.num_response_tokens)
        return gather_ragged_rows(every, self.response_offsets, torch.as_tensor(rows, dtype=torch.int64))[0]


def dummy_rows() -> TokenRows:
    """Return minimal rows that run every layer, for a rank without rows while its peers still compute."""
    return TokenRows(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), torch.tensor([1]))


@dataclass(frozen=True)
class SharedLayout:
    """Layout of computed tokens for rows that share prompts; on the host."""

    source_T: Tensor
    """Packed token that is computed at each place."""
    place_A: Tensor
    """Place at which each packed token is computed."""
    segment_T: Tensor
    segments_BS: Tensor
    """[B, segments] 1 if the row has the segment, else 0; float32."""
    attend: Mix
    """Attention over these tokens only."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows on the device: the tokens that this rank runs through the decoder, and the loss's inputs.

    A rank runs all `T` tokens and rates all `P` places, unless context ranks share them (`context.token_placement`).
    """

    members: Sequence[int]
    """Indexes of these rows in the batch; empty for dummy rows that equalise the number of micro-batches."""
    num_rows: int
    num_tokens: int
    """Tokens of the rows, on all context ranks together."""
    response: dict[str, Tensor]
    """Columns of the response tokens [R]."""
    row_of_response_R: Tensor
    """Row, within this micro-batch, of each response token."""
    tokens_T: Tensor
    positions_T: Tensor
    """Position of each token in its row, from 0."""
    row_T: Tensor
    """Row, within this micro-batch, of each token, or its segment if rows share prompts; -1 at padding."""
    attend: Mix
    """Attention for this micro-batch only."""
    places_P: Tensor
    """Tokens to rate: for log-probs, the one before each response token."""
    targets_P: Tensor | None
    """Token after each place, or [P, 1 + J] with others beside it; None under a value head."""
    copies: Copies | None = None
    """Copies of tokens that are rated for several rows; None without any."""
    segments_BS: Tensor | None = None
    """As in `SharedLayout`; None if rows share no prompts."""
    route: RecordingRoute | None = None
    source_T: Tensor | None = None
    """Packed index of each token, -1 at padding; None if all are present in order."""
    gather_R: Callable[[Tensor], Tensor] | None = None
    """Collects the ratings [P, ...] of all context ranks in row order; None if they are. Collective."""


def to_microbatch(
    rows: TokenRows, members: Sequence[int], device: torch.device, rating: Rating, layout: SharedLayout | None = None
) -> MicroBatch:
    """Move the rows, a batch's `members`, to the device; with a layout, only the tokens that it computes."""
    row_T = torch.arange(len(rows)).repeat_interleave(rows.lengths_B)
    positions_T = torch.arange(rows.tokens_T.numel()) - rows.offsets[:-1][row_T]
    row_of_response_R = torch.arange(len(rows)).repeat_interleave(rows.response_offsets.diff())
    places_P = rows.rated_places(rating)
    whole = MicroBatch(
        members,
        num_rows=len(rows),
        num_tokens=rows.tokens_T.numel(),
        response={name: to_device(values, device) for name, values in rows.response.items()},
        row_of_response_R=to_device(row_of_response_R, device),
        tokens_T=to_device(rows.tokens_T, device),
        positions_T=to_device(positions_T, device),
        row_T=to_device(row_T, device),
        # The offsets stay on the host, so that nothing waits for the device.
        attend=PackedCausalAttention(rows.offsets),
        places_P=to_device(places_P, device),
        targets_P=to_device(rows.targets_at(places_P), device) if rating == "logprobs" else None,
    )
    if layout is None:
        return whole
    copies, source_T = Copies.of(layout.place_A[places_P]).to(device), layout.source_T
    return replace(
        whole,
        tokens_T=to_device(rows.tokens_T[source_T], device),
        positions_T=to_device(positions_T[source_T], device),
        row_T=to_device(layout.segment_T, device),
        attend=layout.attend,
        places_P=copies.index,
        copies=copies,
        segments_BS=to_device(layout.segments_BS, device),
        source_T=to_device(source_T, device),
    )


@dataclass(frozen=True)
class Scores:
    """The model's ratings of the response tokens, given the prompt and the earlier response tokens."""

    logprobs_R: Tensor
    """Log-probability of each response token under softmax(logits / temperature), float32."""
    entropy_R: Tensor
    """Entropy in nats of each response token's distribution, float32."""
    others_RJ: Tensor | None = None
    """Log-probabilities of the rows' `other_tokens` in the place of each response token, followed by that of all
    remaining tokens together; float32."""


@dataclass(frozen=True)
class LossTerms:
    """One micro-batch's share of the loss: shares over all micro-batches and data ranks add up to the whole."""

    loss: Tensor
    """Scalar with a graph, already weighted, for example by 1 / total tokens."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """Name to (sum, count), scalars that add up over micro-batches and ranks."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Name to a scalar whose maximum over micro-batches and ranks is reported."""

    def detached(self) -> LossTerms:
        """Return a copy without the graph, which would keep the micro-batch alive."""
        metrics = {name: (total.detach(), count.detach()) for name, (total, count) in self.metrics.items()}
        return LossTerms(self.loss.detach(), metrics, {name: value.detach() for name, value in self.maxima.items()})


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens in the place of each response token, likeliest first."""

    ids_RJ: Tensor
    """Token ids, int64."""
    logprobs_RJ: Tensor
    """Log-probability of each under softmax(logits / temperature) over the whole vocabulary, followed by that of all
    others together [R, J + 1]; float32."""


LossFunction = Callable[[Any, MicroBatch], LossTerms]
"""From `Scores`, or a value head's float32 values [R] or [B], and their rows."""
