"""A row that takes turns with an environment, and the request that each of its turns is to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.rows import turn_texts
from spmdrl.engines.environment.episode import Episode, Turn
from spmdrl.engines.generation.protocol import Decode, Finish, PartialResponse, Request, Response, completes_stop_string
from spmdrl.runtime.workers.verdict import Outcome


@dataclass(eq=False)
class TurnRow:
    """A row that takes turns: its tokens so far, and where the present turn begins."""

    request: Request
    member: int
    prompt: Prompt
    so_far: PartialResponse = field(default_factory=lambda: PartialResponse((), (), (), None, ()))
    turn: int = 1
    start: int = 0
    """tokens before the present turn"""
    outcome: Outcome | None = None

    @classmethod
    def of_member(cls, request: Request, member: int, prompt: Prompt, decode: Decode) -> TurnRow:
        """A row of the request, with what it brings along."""
        given = request.given[member]
        if not given.token_ids:
            return cls(request, member, prompt)
        assert given.turns is not None, f"row {request.rows[member]} has tokens, but not their turns"
        last = max(given.turns)
        row = cls(request, member, prompt, given, last, given.turns.index(last))
        # The environment has already seen a pending row's last turn, even if it answered nothing.
        if not given.turns[-1] or _is_over(given.token_ids[row.start :], request, decode):
            row.begin_turn()
        return row

    @property
    def row(self) -> int:
        return self.request.rows[self.member]

    @property
    def num_left(self) -> int:
        """Tokens that the row may still get."""
        return self.request.sampling.max_tokens - len(self.so_far.token_ids)

    def begin_turn(self) -> None:
        """Whatever comes next is another turn of the model."""
        self.turn, self.start = self.turn + 1, len(self.so_far.token_ids)

    def turn_request(self) -> Request:
        """The present turn as the engine answers it: all before it is the prompt."""
        given, start = self.so_far, self.start
        in_turn = PartialResponse(
            given.token_ids[start:], given.logprobs[start:], given.versions[start:], given.choices
        )
        sampling = self.request.sampling
        return Request(
            (self.row,),
            (*self.request.prompt_ids, *given.token_ids[:start]),
            # Engines whose random numbers begin with each request must not repeat those of the turns before.
            ((self.request.seeds[self.member] + start) % (1 << 63),),
            replace(sampling, max_tokens=sampling.max_tokens - start),
            partial=(in_turn,) if in_turn.token_ids else None,
        )

    def take(self, response: Response) -> None:
        """Add what the engine gave in the present turn, in place of what it was given of it."""
        before, start = self.so_far, self.start
        assert before.turns is not None
        self.so_far = PartialResponse(
            before.token_ids[:start] + response.token_ids,
            before.logprobs[:start] + response.logprobs,
            before.versions[:start] + response.versions,
            _continued(before, response),
            before.turns[:start] + (self.turn,) * len(response.token_ids),
        )

    def read(self, token_ids: Sequence[int], version: int) -> None:
        """Add what the environment gave the model to read, and begin another turn."""
        before, num_new = self.so_far, len(token_ids)
        assert before.turns is not None
        self.so_far = PartialResponse(
            before.token_ids + tuple(token_ids),
            before.logprobs + (0.0,) * num_new,
            before.versions + (version,) * num_new,
            before.choices,
            before.turns + (0,) * num_new,
        )
        self.begin_turn()

    def episode(self, decode: Decode) -> Episode:
        """The row as the environment sees it when the present turn has ended."""
        given = self.so_far
        assert given.turns is not None
        *before, (text, _) = turn_texts(given.token_ids, given.turns, decode)
        turns = tuple(Turn(*texts) for texts in before)
        seed = self.request.seeds[self.member]
        return Episode(self.prompt.original, dict(self.prompt.columns), seed, turns, text)

    def response(self, finish: Finish) -> Response:
        given = self.so_far
        return Response(
            self.row, given.token_ids, given.logprobs, finish, given.versions, given.choices, given.turns, self.outcome
        )


def _is_over(turn_ids: Sequence[int], request: Request, decode: Decode) -> bool:
    """Whether a stop token or a stop string ended these tokens of one turn."""
    sampling = request.sampling
    if turn_ids[-1] in sampling.stop_token_ids:
        return True
    return bool(sampling.stop_strings) and completes_stop_string(turn_ids, sampling.stop_strings, decode)


def _continued(before: PartialResponse, response: Response) -> torch.Tensor | None:
    """The experts of all tokens fed; those that were known keep what was chosen when they were drawn from."""
    if before.choices is None or response.choices is None:
        return response.choices
    return torch.cat((before.choices, response.choices[len(before.choices) :]))
