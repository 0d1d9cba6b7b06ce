"""From columns of the dock to the packed rows that engines take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spmdrl.dataflow.samples.dock import Samples
from spmdrl.dataflow.stages.model_tokens import ModelTokens
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.training.batching.packed_rows import TokenRows
from spmdrl.engines.training.routing.routers import RoutingConfig, experts_of_rows
from spmdrl.types import Batch, offsets_of

ROUTED_EXPERTS = "routed_experts"


def join_ragged(batch: Batch, first: str, second: str) -> tuple[Tensor, Tensor]:
    """Values and offsets of rows that hold `first`'s run, then `second`'s."""
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


def replayed_columns(routing: RoutingConfig) -> frozenset[str]:
    """What a pass over the policy's own rows reads so that tokens go to the experts that generation chose."""
    return frozenset({ROUTED_EXPERTS} if routing.replay == "rollout" else ())


def mini_batch_of_rows(batch: Batch, samples: Samples, num_parts: int) -> Tensor:
    """The mini-batch [B] of each row: a range of prompts, so that it holds the same rows on any number of ranks."""
    groups = torch.from_numpy(samples.rows_of_step[:: samples.group_size] // samples.group_size)
    place_B = torch.searchsorted(groups, batch.rows // samples.group_size)
    return place_B * num_parts // len(groups)


def token_rows(batch: Batch, model: DecoderConfig, response_columns: Iterable[str] = ()) -> TokenRows:
    """Prompt and response of each row as one run, with the named columns for each response token of the model.

    Where the batch has the experts of its tokens, the rows have them too, as `model` uses them.
    """
    tokens_T, offsets = join_ragged(batch, "prompt_ids", "response_ids")
    model_tokens = ModelTokens.of(batch)
    response = {name: model_tokens.pick(batch.values(name)) for name in response_columns}
    experts_TLC = None
    if ROUTED_EXPERTS in batch:
        experts_TLC = experts_of_rows(batch.values(ROUTED_EXPERTS), offsets.diff(), model)
    # The dock's token ids are int32; embeddings and losses index with int64.
    is_model_T = _written_by_model(batch, offsets, model_tokens)
    return TokenRows(tokens_T.long(), offsets, batch.lengths("prompt_ids"), response, experts_TLC, is_model_T)


def _written_by_model(batch: Batch, offsets: Tensor, model_tokens: ModelTokens) -> Tensor | None:
    """Which tokens of the joined rows the model wrote; None where it wrote all behind the prompts."""
    if model_tokens.is_model is None:
        return None
    is_model_T = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    starts_B = offsets[:-1] + batch.lengths("prompt_ids")
    is_model_T[_positions(starts_B, batch.lengths("response_ids"))] = model_tokens.is_model
    return is_model_T
