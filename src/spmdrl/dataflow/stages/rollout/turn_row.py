"""A row that takes turns with an environment, and its request to the engine for each turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import pad

from spmdrl.dataflow.data.column_names import Messages
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.rows import BEGINS_PIECE, turn_texts
from spmdrl.engines.environment.episode import Episode, Observation, Opening, Reply, Row, Tokens, Turn, TurnParts
from spmdrl.engines.generation.protocol import Decode, Finish, PartialResponse, Request, Response, completes_stop_string
from spmdrl.engines.models.conversation import Exchange
from spmdrl.nouns.settings.data_config import thought
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
    piece: int = 0
    """number of tokens before the present piece; 0: it begins with the prompt"""
    num_earlier_choices: int = 0
    """number of experts, in `so_far.choices`, of tokens before it"""
    opening: Observation | Reply | Tokens | None = None
    """messages in place of the data's prompt, or text that ends it"""
    ended: Episode | None = None
    """the row at the end of its last turn"""
    exchanges: list[Exchange] | None = field(default_factory=list)
    """turns behind the prompt or opening, each with its reply; None if one wasn't in messages"""
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
        if not isinstance(opening, Opening):
            return prompt.original, prompt.columns
        return [*map(dict, opening.messages)], {**prompt.columns, "tools": opening.tools}

    @property
    def num_left(self) -> int:
        """Number of tokens that the row may still get."""
        return self.request.sampling.max_tokens - len(self.so_far.token_ids)

    @property
    def piece_ids(self) -> tuple[int, ...]:
        """Tokens of the present piece, those of the prompt included if it begins with it."""
        ids = self.so_far.token_ids
        return ids[self.piece :] if self.piece else (*self.request.prompt_ids, *ids)

    def begin_turn(self) -> None:
        """Start another turn of the model with the next token."""
        self.turn, self.start = self.turn + 1, len(self.so_far.token_ids)

    def turn_request(self) -> Request:
        """Return the engine's request for the present turn: all of the piece before it is the prompt."""
        given, start = self.so_far, self.start
        in_turn = PartialResponse(
            given.token_ids[start:], given.logprobs[start:], given.versions[start:], given.choices
        )
        sampling, piece_ids = self.request.sampling, self.piece_ids
        return Request(
            (self.row,),
            piece_ids[: len(piece_ids) - len(in_turn.token_ids)],
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
            self._continued(response.choices),
            before.turns[:start] + (self.turn,) * len(response.token_ids),
        )

    def _continued(self, choices: torch.Tensor | None) -> torch.Tensor | None:
        """Return the experts of all fed tokens, given the piece's; known ones keep those by which they were drawn."""
        known = self.so_far.choices
        if known is None or choices is None:
            return choices
        return torch.cat((known, choices[len(known) - self.num_earlier_choices :]))

    def earn(self, reward: float) -> None:
        """Put the reward of the turn that just ended at its last token."""
        self.rewards[len(self.so_far.token_ids) - 1] = reward

    def extend(self, read: Observation | Reply | Tokens) -> None:
        """Add the turn that just ended and its answer to the conversation, or begin another one by an opening."""
        if isinstance(read, Opening) or not self.turn:
            self.opening, self.exchanges = read, []
        elif not isinstance(read, Reply) or self.exchanges is None:
            self.exchanges = None
        else:
            assert self.ended is not None, "a reply follows a turn"
            self.exchanges.append((_message(self.ended), read.messages))

    def read(self, token_ids: Sequence[int], version: int, *, begins_piece: bool = False) -> None:
        """Add the environment's tokens, and start another turn."""
        before, num_new = self.so_far, len(token_ids)
        assert before.turns is not None
        choices, first = before.choices, 0
        if begins_piece:
            self.piece, first = len(before.token_ids), BEGINS_PIECE
            if choices is not None:
                # The last token before it is fed nowhere: no experts are replayed for it.
                num_fed = len(self.request.prompt_ids) + self.piece - 1
                choices = pad(choices, (0, choices.numel() // num_fed), value=-1)
                self.num_earlier_choices = choices.numel()
        self.so_far = PartialResponse(
            before.token_ids + tuple(token_ids),
            before.logprobs + (0.0,) * num_new,
            before.versions + (version,) * num_new,
            choices,
            before.turns + (first, *(0,) * (num_new - 1)) if num_new else before.turns,
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


def _message(turn: Episode) -> dict[str, Any]:
    """Return a turn of the model as chat templates take it: as its text, if that couldn't be read."""
    if turn.problems or not (turn.content or turn.reasoning or turn.calls):
        return {"role": "assistant", "content": turn.response}
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [{"type": "function", "function": vars(call)} for call in turn.calls]
    return message | (thought(turn.reasoning) if turn.reasoning else {})
