"""Conversion from columns of the dock to packed rows for engines, and the selection of the model's tokens.

The dock keeps whole rows. Engines and algorithms get the model's tokens only, so that no token of an environment is
scored, weighted, counted or trained on.

Shape letters: `R` packed response tokens that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from spmdrl.dataflow.samples.schema import COPIES, length_column
from spmdrl.dataflow.samples.step_rows import StepRows
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.training.packed_rows import OTHER_TOKENS, TokenRows
from spmdrl.engines.training.routers import experts_of_rows
from spmdrl.nouns.batch import Batch, CreditInputs, CreditSettings, offsets_of
from spmdrl.resources.device import to_device

ROUTED_EXPERTS = "routed_experts"
TURNS = "turns"
"""Column of rows with an environment: the turn of each of the model's tokens, from 1, else 0 or `BEGINS_PIECE`."""
BEGINS_PIECE = -1
"""Marks the environment's first token of a *piece*: it, and what follows, is computed without what is before."""
TURN_REWARDS = "turn_rewards"
"""Column of such rows: the environment's reward of a turn at its last token, else 0."""

TOP_IDS = "teacher_top_ids"
_SEVERAL_PER_TOKEN = (TOP_IDS, "teacher_top_logprobs")


def credit_inputs(batch: Batch, names: Iterable[str], group_size: int, settings: CreditSettings) -> CreditInputs:
    """Return an algorithm's inputs for credit: rewards and columns, restricted to the model's tokens."""
    model_tokens, columns = ModelTokens.of(batch), Batch(batch.rows)
    for name in names:
        if not batch.is_ragged(name):
            columns.put_dense(name, batch.dense(name))
        elif length_column(name) == "response_ids":
            columns.put_ragged(name, model_tokens.pick(batch.values(name)), offsets_of(model_tokens.lengths_B))
        else:
            columns.put_ragged(name, batch.values(name), batch.offsets(name))
    return CreditInputs(batch.dense("reward"), batch.rows // group_size, model_tokens.lengths_B, columns, settings)


@dataclass(frozen=True)
class ModelTokens:
    """Places of the model's tokens among all packed response tokens of a batch."""

    offsets: Tensor
    """[B + 1]: row b has those between `offsets[b]` and `offsets[b + 1]`"""
    is_model: Tensor | None
    """bool, one per response token; None if the model wrote all"""

    @classmethod
    def of(cls, batch: Batch) -> ModelTokens:
        """Find them by the column `turns`; without it the model wrote every token of `response_ids`."""
        offsets = batch.offsets("response_ids")
        if TURNS not in batch:
            return cls(offsets, None)
        is_model = batch.values(TURNS) > 0
        return cls(offsets_of(is_model)[offsets], is_model)

    @property
    def lengths_B(self) -> Tensor:
        """Number of the model's tokens in each row."""
        return self.offsets.diff()

    def pick(self, values: Tensor) -> Tensor:
        """Return the values [R, ...] of the model's tokens, from one per response token."""
        return values if self.is_model is None else values[self.is_model]

    def spread(self, values_R: Tensor) -> Tensor:
        """Return a value [R, ...] per response token, on the device of `values_R`: 0 for the environment's."""
        if self.is_model is None:
            return values_R
        out = values_R.new_zeros(len(self.is_model), *values_R.shape[1:])
        # Positions are found on the host: with a mask the device would have to count them while the host waits.
        out[to_device(self.is_model.nonzero().squeeze(1), out.device)] = values_R
        return out


def piece_places(batch: Batch) -> Tensor:
    """Return the place in the batch of each of `token_rows`: of each piece of its rows, in order."""
    if TURNS not in batch:
        return torch.arange(len(batch))
    num_begun_B = offsets_of(batch.values(TURNS) == BEGINS_PIECE)[batch.offsets(TURNS)].diff()
    return torch.arange(len(batch)).repeat_interleave(num_begun_B + 1)


def copies_of(batch: Batch) -> Tensor:
    """Return how often each row is trained on [B]: once without the column `copies`."""
    return batch.dense(COPIES).long() if COPIES in batch else torch.ones_like(batch.rows)


def _join_ragged(batch: Batch, first: str, second: str) -> tuple[Tensor, Tensor]:
    """Return values and offsets of rows that hold `first`'s run, then `second`'s."""
    first_lengths, second_lengths = batch.lengths(first), batch.lengths(second)
    offsets = offsets_of(first_lengths + second_lengths)
    out = torch.empty(int(offsets[-1]), dtype=batch.values(first).dtype)
    starts = offsets[:-1]
    out[_positions(starts, first_lengths)] = batch.values(first)
    out[_positions(starts + first_lengths, second_lengths)] = batch.values(second)
    return out, offsets


def _positions(starts_B: Tensor, lengths_B: Tensor) -> Tensor:
    within = torch.arange(int(lengths_B.sum())) - offsets_of(lengths_B)[:-1].repeat_interleave(lengths_B)
    return starts_B.repeat_interleave(lengths_B) + within


def mini_batch_of_rows(rows_B: Tensor, step: StepRows, num_parts: int) -> Tensor:
    """Return the mini-batch [B] of each row: a range of the trained prompts, the same on any number of ranks."""
    groups = torch.from_numpy(step.groups_to_train)
    place_B = torch.searchsorted(groups, rows_B // step.group_size)
    return place_B * num_parts // max(len(groups), 1)


def token_rows(
    batch: Batch, model: DecoderConfig, response_columns: Iterable[str] = (), *, unit_size: int = 1
) -> TokenRows:
    """Join each row's prompt and response, with the named columns for each response token of the model.

    Each piece of a row is a row: all before its first token of the model is its prompt. Missing columns are omitted.
    Recorded experts are included, if the batch has them, as `model` uses them.
    """
    tokens_T, offsets = _join_ragged(batch, "prompt_ids", "response_ids")
    model_tokens = ModelTokens.of(batch)
    response = {name: _by_token(batch, name, model_tokens) for name in response_columns if name in batch}
    if TOP_IDS in response:
        response[OTHER_TOKENS] = response.pop(TOP_IDS).long()
    experts_TLC = None
    if ROUTED_EXPERTS in batch:
        experts_TLC = experts_of_rows(batch.values(ROUTED_EXPERTS), offsets.diff(), model)
    # The dock's token ids are int32; embeddings and losses index with int64.
    turns_T = _turns_of_rows(batch, offsets)
    is_model_T = None if turns_T is None else turns_T > 0
    prompt_lengths_B = batch.lengths("prompt_ids")
    if turns_T is not None and (begun := (turns_T == BEGINS_PIECE).nonzero().squeeze(1)).numel():
        offsets, order = torch.cat((offsets[:-1], begun, offsets[-1:])).sort()
        # From each start to the model's next token, or to the end.
        places = torch.cat(((turns_T > 0).nonzero().squeeze(1), torch.tensor([len(turns_T)])))
        lengths = torch.cat((prompt_lengths_B, places[torch.searchsorted(places, begun)] - begun))
        prompt_lengths_B = lengths[order[:-1]].minimum(offsets.diff())
    return TokenRows(tokens_T.long(), offsets, prompt_lengths_B, response, experts_TLC, is_model_T, unit_size)


def _by_token(batch: Batch, name: str, model_tokens: ModelTokens) -> Tensor:
    """Return a value per model token, or [R, J] of a wider column; a row's value, as float32, for all its tokens."""
    if not batch.is_ragged(name):
        return batch.dense(name).float().repeat_interleave(model_tokens.lengths_B)
    values, num_tokens = batch.values(name), batch.values("response_ids").numel()
    if name in _SEVERAL_PER_TOKEN:
        values = values.view(num_tokens, values.numel() // max(num_tokens, 1))
    return model_tokens.pick(values)


def _turns_of_rows(batch: Batch, offsets: Tensor) -> Tensor | None:
    """Return the turn of each token of the joined rows, 0 in prompts; None if the model wrote all after these."""
    if TURNS not in batch:
        return None
    turns_T = torch.zeros(int(offsets[-1]), dtype=batch.values(TURNS).dtype)
    starts_B = offsets[:-1] + batch.lengths("prompt_ids")
    turns_T[_positions(starts_B, batch.lengths("response_ids"))] = batch.values(TURNS)
    return turns_T


def turn_texts(
    token_ids: Sequence[int], turns: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[tuple[str, str]]:
    """Return each turn's text of the model, and the environment's reply, or "" without one.

    The opening of a row, if it has one, follows an empty text.
    """
    texts: list[tuple[str, str]] = []
    for turn, run in groupby(zip(token_ids, turns, strict=True), key=lambda one: max(one[1], 0)):
        text = decode([token for token, _ in run])
        if turn or not texts:
            texts.append((text, "") if turn else ("", text))
        else:
            texts[-1] = (texts[-1][0], text)
    return texts
