"""Groups that this rank answers in a step, begun in it or before, and what is kept of those that it doesn't finish."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.carried import FINISH
from spmdrl.dataflow.stages.model_tokens import TURNS
from spmdrl.dataflow.stages.rows import ROUTED_EXPERTS
from spmdrl.engines.generation.protocol import Finish, PartialResponse, Request, Response, SamplingParams
from spmdrl.engines.generation.replay import packed_outcomes, unpacked_outcomes
from spmdrl.engines.workers.verdict import Outcome
from spmdrl.types import Batch, offsets_of

_FINISHES: tuple[Finish, ...] = get_args(Finish)
OUTCOME_REWARD, OUTCOME_VERDICT = "outcome_reward", "outcome_verdict"
"""Dense columns of a carried group with rows that an environment judged."""


@dataclass(frozen=True)
class OwnGroup:
    """A group that was dealt to this rank's replica."""

    serial: int
    round: int
    prompt: Prompt
    seeds: tuple[int, ...]
    begun: tuple[Response, ...]
    """What its rows have so far, under their numbers in this step's batch; `aborted` where they go on."""

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(response.row for response in self.begun)

    def request(self, sampling: SamplingParams) -> Request | None:
        """What the rows that go on ask of the engine; None where all have ended."""
        members = [number for number, response in enumerate(self.begun) if response.finish == "aborted"]
        if not members:
            return None
        going_on = [self.begun[member] for member in members]
        return Request(
            rows=tuple(response.row for response in going_on),
            prompt_ids=tuple(self.prompt.prompt_ids),
            seeds=tuple(self.seeds[member] for member in members),
            sampling=sampling,
            partial=tuple(map(_partial, going_on)) if any(response.token_ids for response in going_on) else None,
        )

    def answered(self, responses: Iterable[Response]) -> tuple[Response, ...]:
        """All its rows, with the engine's responses to those that were requested."""
        by_row = {response.row: response for response in responses}
        return tuple(by_row.get(response.row, response) for response in self.begun)


def is_whole(responses: Iterable[Response]) -> bool:
    """Whether every response has come to its end."""
    return all(response.finish != "aborted" for response in responses)


def row_seed(seed: int, step: int, row: int) -> int:
    """The 63-bit sampling seed of a row: the same on any number of ranks, and after a resume."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeds_of_group(seed: int, serial: int, num_wanted: int, size: int) -> tuple[int, ...]:
    """The seeds of a group's rows, whichever step begins it: those of the step that would train it if all kept pace."""
    step, number = divmod(serial, num_wanted)
    return tuple(row_seed(seed, step + 1, number * size + member) for member in range(size))


def nothing_yet(rows: Iterable[int]) -> tuple[Response, ...]:
    """The responses of rows that are to begin."""
    return tuple(Response(row, (), (), "aborted", ()) for row in rows)


def columns_of(responses: Sequence[Response]) -> Batch:
    """The generation state's columns of finished responses."""
    batch = _token_columns(responses)
    finished = [int(response.finish == "stop") for response in responses]
    batch.put_dense("finished", torch.tensor(finished, dtype=torch.int32))
    choices = [response.choices for response in responses if response.choices is not None]
    assert not choices or len(choices) == len(responses), f"{len(choices)} of {len(responses)} have their experts"
    return batch


def packed(responses: Sequence[Response]) -> Batch:
    """The responses of a group as they are carried over."""
    batch = _token_columns([replace(response, row=member) for member, response in enumerate(responses)])
    finishes = [_FINISHES.index(response.finish) for response in responses]
    batch.put_dense(FINISH, torch.tensor(finishes, dtype=torch.int32))
    if any(response.outcome is not None for response in responses):
        rewards, verdicts = packed_outcomes(responses)
        batch.put_dense(OUTCOME_REWARD, rewards)
        batch.put_dense(OUTCOME_VERDICT, verdicts)
    return batch


def unpacked(batch: Batch, rows: Sequence[int]) -> tuple[Response, ...]:
    """What `packed` was given, under these row numbers."""
    token_ids, logprobs, versions = (batch.to_lists(name) for name in ("response_ids", "rollout_logprobs", "versions"))
    turns = batch.to_lists(TURNS) if TURNS in batch else None
    outcomes: list[Outcome | None] = [None] * len(rows)
    if OUTCOME_VERDICT in batch:
        outcomes = unpacked_outcomes(batch.dense(OUTCOME_REWARD), batch.dense(OUTCOME_VERDICT))
    out = []
    for member, (row, finish) in enumerate(zip(rows, batch.dense(FINISH).tolist(), strict=True)):
        choices = batch.select([member]).values(ROUTED_EXPERTS) if ROUTED_EXPERTS in batch else None
        out.append(
            Response(
                row, tuple(map(int, token_ids[member])), tuple(logprobs[member]), _FINISHES[finish],
                tuple(map(int, versions[member])), choices if choices is not None and choices.numel() else None,
                None if turns is None else tuple(map(int, turns[member])), outcomes[member],
            )
        )  # fmt: skip
    return tuple(out)


def _token_columns(responses: Sequence[Response]) -> Batch:
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


def _partial(response: Response) -> PartialResponse:
    return PartialResponse(response.token_ids, response.logprobs, response.versions, response.choices, response.turns)
