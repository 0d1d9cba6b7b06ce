"""What a training engine takes and gives: packed rows in, scores and loss terms out.

Shape letters: `B` rows, `T` packed tokens, `R` packed response tokens of those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spmdrl.types import gather_ragged_rows, offsets_of
from spmdrl.types.roles import Rating


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
    """Tokens of each row that are given, not learned."""
    response: dict[str, Tensor] = field(default_factory=dict)
    """Values per response token, packed over rows [R]."""
    dense: dict[str, Tensor] = field(default_factory=dict)
    """Values per row [B]."""
    experts_TLC: Tensor | None = None
    """Experts that each token is to use in each sparse layer, -1 where the router chooses."""
    is_model_T: Tensor | None = None
    """bool: which tokens the model wrote, where an environment wrote others behind the prompt; None: all behind it."""

    def __post_init__(self) -> None:
        num_rows, num_tokens = self.offsets.numel() - 1, self.tokens_T.numel()
        if num_rows < 0 or int(self.offsets[-1]) != num_tokens or self.prompt_lengths_B.shape != (num_rows,):
            raise ValueError(
                f"{num_tokens} tokens, offsets {self.offsets.tolist()[:1]}..{self.offsets.tolist()[-1:]} and "
                f"{self.prompt_lengths_B.numel()} prompt lengths don't describe the same rows; "
                "offsets start at 0, end at the number of tokens and number one more than the rows"
            )
        wrong = (self.prompt_lengths_B < 1) | (self.prompt_lengths_B > self.lengths_B)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"row {row} has a prompt of {int(self.prompt_lengths_B[row])} tokens in {int(self.lengths_B[row])}, "
                "but the first response token needs at least one token before it; begin the row with a prompt token"
            )
        self._check_is_model()
        for name, values, expected in self._sized_values():
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
            raise ValueError("is_model_T names tokens of a prompt, but the model only writes behind it")

    def _sized_values(self) -> list[tuple[str, Tensor, int]]:
        response = [(name, values, self.num_response_tokens) for name, values in self.response.items()]
        return response + [(name, values, len(self)) for name, values in self.dense.items()]

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths_B(self) -> Tensor:
        return self.offsets.diff()

    @property
    def response_offsets(self) -> Tensor:
        """[B + 1]: row b's response tokens among the R packed ones."""
        if self.is_model_T is not None:
            return offsets_of(self.is_model_T)[self.offsets]
        return offsets_of(self.lengths_B - self.prompt_lengths_B)

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_offsets[-1])

    def rated_places(self, rating: Rating) -> Tensor:
        """The packed token before each response token [R], or the last one of each row [B]."""
        if rating == "row_values":
            return self.offsets[1:] - 1
        if self.is_model_T is not None:
            return self.is_model_T.nonzero().squeeze(1) - 1
        bounds = self.response_offsets
        shift_B = self.offsets[:-1] + self.prompt_lengths_B - 1 - bounds[:-1]
        return torch.arange(int(bounds[-1])) + shift_B.repeat_interleave(bounds.diff())

    def select(self, rows: Sequence[int]) -> TokenRows:
        """Copy the rows at these positions, in that order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        tokens_T, offsets = gather_ragged_rows(self.tokens_T, self.offsets, index)
        bounds = self.response_offsets
        return TokenRows(
            tokens_T=tokens_T,
            offsets=offsets,
            prompt_lengths_B=self.prompt_lengths_B[index],
            response={name: gather_ragged_rows(values, bounds, index)[0] for name, values in self.response.items()},
            dense={name: values[index] for name, values in self.dense.items()},
            experts_TLC=(
                None if self.experts_TLC is None else gather_ragged_rows(self.experts_TLC, self.offsets, index)[0]
            ),
            is_model_T=(
                None if self.is_model_T is None else gather_ragged_rows(self.is_model_T, self.offsets, index)[0]
            ),
        )

    def response_index(self, rows: Sequence[int]) -> Tensor:
        """Where the response tokens of `select(rows)` stand among this object's R packed ones."""
        every = torch.arange(self.num_response_tokens)
        return gather_ragged_rows(every, self.response_offsets, torch.as_tensor(rows, dtype=torch.int64))[0]


@dataclass(frozen=True)
class MicroBatch:
    """Some rows on the device, with what the decoder and a loss need to find their way in them."""

    tokens_T: Tensor
    offsets: Tensor
    prompt_lengths_B: Tensor
    response: dict[str, Tensor]
    dense: dict[str, Tensor]
    row_of_response_R: Tensor
    """The row, within this micro-batch, of each response token."""
    positions_T: Tensor
    """Each token's position in its row, from 0."""
    predicting_R: Tensor
    """The packed position that predicts each response token: the one before it."""

    @property
    def num_rows(self) -> int:
        return self.offsets.numel() - 1

    @property
    def targets_R(self) -> Tensor:
        """The response tokens."""
        return self.tokens_T[self.predicting_R + 1]


def to_microbatch(rows: TokenRows, device: torch.device) -> MicroBatch:
    """Move rows to the device."""
    lengths_B = rows.lengths_B
    row_of_token_T = torch.arange(len(rows)).repeat_interleave(lengths_B)
    positions_T = torch.arange(rows.tokens_T.numel()) - rows.offsets[:-1][row_of_token_T]
    return MicroBatch(
        tokens_T=rows.tokens_T.to(device),
        offsets=rows.offsets.to(device),
        prompt_lengths_B=rows.prompt_lengths_B.to(device),
        response={name: values.to(device) for name, values in rows.response.items()},
        dense={name: values.to(device) for name, values in rows.dense.items()},
        row_of_response_R=torch.arange(len(rows)).repeat_interleave(rows.response_offsets.diff()).to(device),
        positions_T=positions_T.to(device),
        predicting_R=rows.rated_places("logprobs").to(device),
    )


@dataclass(frozen=True)
class Scores:
    """How the model rates the response tokens, given the prompt and the earlier response tokens."""

    logprobs_R: Tensor
    """Log-probability of each response token under softmax(logits / temperature), float32."""
    entropy_R: Tensor
    """Entropy in nats of the distribution that each response token was drawn from, float32."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.logprobs_R, self.entropy_R


@dataclass(frozen=True)
class Values:
    """What a value head says, float32: of each response token before it comes [R], or of each whole row [B]."""

    values: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)


@dataclass(frozen=True)
class LossTerms:
    """One micro-batch's share of the loss: shares over all micro-batches and data ranks add up to the whole."""

    loss: Tensor
    """Scalar with a graph; weights such as 1 / total tokens are already inside."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """Name to (sum, count), scalars that add up over micro-batches and ranks."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Name to a scalar of which the largest over micro-batches and ranks counts."""


LossFunction = Callable[[Any, MicroBatch], LossTerms]
"""From `Scores`, or `Values` where the head is a value head, and the rows that they are of."""
