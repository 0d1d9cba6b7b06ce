"""A row that takes turns with an environment, and its request to the engine for each turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from spmdrl.dataflow.data.column_names import Messages
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.rows import turn_texts
from spmdrl.engines.environment.episode import Episode, Opening, Row, Turn, TurnParts
from spmdrl.engines.generation.protocol import Decode, Finish, PartialResponse, Request, Response, completes_stop_string
from spmdrl.runtime.workers.verdict import Outcome

ReadTurn = Callable[["TurnRow", Sequence[int]], TurnParts]
"""Parts of a turn from the places of its tokens in a row."""


@dataclass(eq=False)
class TurnRow:
    """A row that takes turns: its tokens so far, and the start of the present turn."""

    request: Request
    member: int
    prompt: Prompt
    so_far: PartialResponse = field(default_factory=lambda: PartialResponse((), (), (), None, ()))
    turn: int = 1
    """number of the present one; 0 before a row's opening"""
    start: int = 0
    """number of tokens before the present turn"""
    opening: Opening | None = None
    """messages in place of the data's prompt"""
    outcome: Outcome | None = None
    parts: list[TurnParts] = field(default_factory=list)
    """parts of the turns so far"""
    rewards: dict[int, float] = field(default_factory=dict)
    """rewards of turns, by the places of their last tokens"""

    @classmethod
    def of_member(cls, request: Request, member: int, prompt: Prompt, decode: Decode) -> TurnRow:
        """Build a row of the request, with its partial response."""
        given = request.given[member]
        if not given.token_ids:
            return cls(request, member, prompt)
        assert given.turns is not None, f"row {request.rows[member]} has tokens, but not their turns"
        last = max(given.turns)
        rewards = {place: reward for place, reward in enumerate(given.turn_rewards) if reward}
        row = cls(request, member, prompt, given, last, given.turns.index(last), rewards=rewards)
        # The environment has already seen a pending row's last turn, even without a reply.
        if not given.turns[-1] or _is_over(given.token_ids[row.start :], request, decode):
            row.begin_turn()
        return row

    @property
    def row(self) -> int:
        return self.request.rows[self.member]

    @property
    def asked(self) -> tuple[str | Messages, dict[str, Any]]:
        """The prompt, the data's or the environment's, and the columns that its template reads."""
        prompt, opening = self.prompt, self.opening
        if opening is None:
            return prompt.original, prompt.columns
        return [*map(dict, opening.messages)], {**prompt.columns, "tools": opening.tools}

    @property
    def num_left(self) -> int:
        """Number of tokens that the row may still get."""
        return self.request.sampling.max_tokens - len(self.so_far.token_ids)

    def begin_turn(self) -> None:
        """Start another turn of the model with the next token."""
        self.turn, self.start = self.turn + 1, len(self.so_far.token_ids)

    def turn_request(self) -> Request:
        """Return the engine's request for the present turn: all before it is the prompt."""
        given, start = self.so_far, self.start
        in_turn = PartialResponse(
            given.token_ids[start:], given.logprobs[start:], given.versions[start:], given.choices
        )
        sampling = self.request.sampling
        return Request(
            (self.row,),
            (*self.request.prompt_ids, *given.token_ids[:start]),
            # Engines whose random numbers restart with each request must not repeat those of earlier turns.
            ((self.request.seeds[self.member] + start) % (1 << 63),),
            replace(sampling, max_tokens=sampling.max_tokens - start),
            partial=(in_turn,) if in_turn.token_ids else None,
        )

    def take(self, response: Response) -> None:
        """Replace the present turn's tokens by the engine's response."""
        before, start = self.so_far, self.start
        assert before.turns is not None
        self.so_far = PartialResponse(
            before.token_ids[:start] + response.token_ids,
            before.logprobs[:start] + response.logprobs,
            before.versions[:start] + response.versions,
            _continued(before, response),
            before.turns[:start] + (self.turn,) * len(response.token_ids),
        )

    def earn(self, reward: float) -> None:
        """Put the reward of the turn that just ended at its last token."""
        self.rewards[len(self.so_far.token_ids) - 1] = reward

    def read(self, token_ids: Sequence[int], version: int) -> None:
        """Add the environment's tokens, and start another turn."""
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

    def begin(self) -> Row:
        """Return the row as the environment sees it before its opening."""
        self.turn = 0
        return Row(self.prompt.original, dict(self.prompt.columns), self.request.seeds[self.member])

    def episode(self, decode: Decode, read: ReadTurn) -> Episode:
        """Return the row as the environment sees it at the end of the present turn."""
        given = self.so_far
        assert given.turns is not None
        texts = turn_texts(given.token_ids, given.turns, decode)[given.turns[0] == 0 :]
        for turn in range(len(self.parts) + 1, len(texts) + 1):
            self.parts.append(read(self, [place for place, of_turn in enumerate(given.turns) if of_turn == turn]))
        *before, last = [Turn(*words, **vars(parts)) for words, parts in zip(texts, self.parts, strict=True)]
        seed = self.request.seeds[self.member]
        return Episode(
            self.prompt.original, dict(self.prompt.columns), seed, tuple(before), last.response, **vars(self.parts[-1])
        )

    def response(self, finish: Finish) -> Response:
        given = self.so_far
        return Response(
            self.row, given.token_ids, given.logprobs, finish, given.versions, given.choices, given.turns,
            tuple(self.rewards.get(place, 0.0) for place in range(len(given.token_ids))), self.outcome,
        )  # fmt: skip


def _is_over(turn_ids: Sequence[int], request: Request, decode: Decode) -> bool:
    """Return True if a stop token or a stop string ended these tokens of one turn."""
    sampling = request.sampling
    if turn_ids[-1] in sampling.stop_token_ids:
        return True
    return bool(sampling.stop_strings) and completes_stop_string(turn_ids, sampling.stop_strings, decode)


def _continued(before: PartialResponse, response: Response) -> torch.Tensor | None:
    """Return the experts of all fed tokens; known ones keep the choices from when they were drawn from."""
    if before.choices is None or response.choices is None:
        return response.choices
    return torch.cat((before.choices, response.choices[len(before.choices) :]))
