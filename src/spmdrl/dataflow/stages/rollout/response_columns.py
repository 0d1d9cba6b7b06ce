"""The generation state's columns of responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmdrl.dataflow.stages.rows import ROUTED_EXPERTS, TURNS
from spmdrl.engines.generation.protocol import Response
from spmdrl.nouns.batch import Batch, offsets_of


def columns_of(responses: Sequence[Response]) -> Batch:
    """The generation state's columns of finished responses."""
    batch = token_columns(responses)
    finished = [int(response.finish == "stop") for response in responses]
    batch.put_dense("finished", torch.tensor(finished, dtype=torch.int32))
    choices = [response.choices for response in responses if response.choices is not None]
    assert not choices or len(choices) == len(responses), f"{len(choices)} of {len(responses)} have their experts"
    return batch


def token_columns(responses: Sequence[Response]) -> Batch:
    """The columns of responses that have a value per token."""
    batch = Batch.of_rows(response.row for response in responses)
    batch.put_lists("response_ids", [response.token_ids for response in responses], torch.int32)
    batch.put_lists("rollout_logprobs", [response.logprobs for response in responses], torch.float32)
    batch.put_lists("versions", [response.versions for response in responses], torch.int32)
    turns = [response.turns for response in responses if response.turns is not None]
    if turns:
        assert len(turns) == len(responses), f"{len(turns)} of {len(responses)} have their turns"
        batch.put_lists(TURNS, turns, torch.int16)
    choices = [response.choices for response in responses]
    known = [part for part in choices if part is not None]
    if known:
        lengths = [0 if part is None else part.numel() for part in choices]
        batch.put_ragged(ROUTED_EXPERTS, torch.cat(known), offsets_of(lengths))
    return batch
