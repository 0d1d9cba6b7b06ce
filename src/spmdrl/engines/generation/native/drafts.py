"""Drafts: tokens that a row is likely to get next, guessed from what its group has and checked in one forward.

A row whose newest tokens stand in its prompt, in its own response or in one of its group's is likely to go on as it
went on there (prompt lookup). The guesses are fed behind the newest token, and one stays if it is what the row draws at
its place, by its own logits and random number: tokens are those of a run without drafts, whatever was guessed.
Keys and values of guesses that don't stay lie behind the row's end, where later tokens overwrite them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from spmdrl.engines.generation.native.running_rows import FedToken, Row, newest_token
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.generation.rollout_config import RolloutConfig

_FIRST_CHANCE = 0.8
_LEARNS, _FORGETS = 0.2, 0.01
"""How far each judged guess, and each step without a guess, moves a row's chance."""

_FREE_TOKENS, _FREE_TOKENS_ELSEWHERE = {"cpu": 16}, 256
"""Tokens more with which a step takes twice the time of one with few, which is that of reading the weights."""

_Place = tuple[list[int], int]
"""Tokens, and the place in them that a run of tokens leads to."""


@dataclass
class _GroupTexts:
    """Where each run of `draft_match` tokens of a group was seen last."""

    num_match: int
    following: dict[tuple[int, ...], _Place] = field(default_factory=dict)
    num_rows: int = 0
    """Rows that use it."""

    def add(self, tokens: list[int], start: int) -> None:
        """Take in the tokens from `start` on as what follows those before them."""
        for place in range(max(start, self.num_match), len(tokens)):
            self.following[tuple(tokens[place - self.num_match : place])] = (tokens, place)

    def guess(self, tokens: list[int], most: int) -> list[int]:
        """What followed the newest tokens elsewhere, at most so much of it."""
        found = self.following.get(tuple(tokens[-self.num_match :]))
        if found is None:
            return []
        source, place = found
        guessed = source[place : place + most]
        if source is tokens:
            # The row repeats itself: so may the guess.
            period = len(guessed)
            guessed += [guessed[i % period] for i in range(period, most)]
        return guessed


@dataclass
class _RowDrafts:
    """How guesses for one row fare."""

    texts: _GroupTexts
    tokens: list[int]
    """Its prompt and the response so far."""
    chance: float = _FIRST_CHANCE
    """That a guess stays, where those before it do: a mean that forgets."""
    num_fed: int = 0
    """Tokens guessed in the last step, which are still to be judged."""

    def judge(self, num_stayed: int) -> None:
        for _ in range(num_stayed):
            self.chance += _LEARNS * (1 - self.chance)
        if num_stayed < self.num_fed:
            self.chance -= _LEARNS * self.chance
        elif not self.num_fed and self.chance < _FIRST_CHANCE:
            self.chance += _FORGETS * (_FIRST_CHANCE - self.chance)
        self.num_fed = 0


class Drafter:
    """Guesses tokens of running rows; the ranks of a replica guess alike, by what the rows have."""

    def __init__(self, rollout: RolloutConfig, device: torch.device):
        self._rollout = rollout
        self._free_tokens = _FREE_TOKENS.get(device.type, _FREE_TOKENS_ELSEWHERE)
        self._texts: dict[int, _GroupTexts] = {}
        self._rows: dict[Row, _RowDrafts] = {}
        self._counts = (0, 0)

    def with_guesses(self, rows: Sequence[Row], room_behind: Callable[[Row, int], int]) -> list[FedToken]:
        """The newest token of each row and guesses behind it: at most `max_running_rows` tokens, unless rows are more.

        `room_behind` finds out how many of so many tokens behind a row's newest one the cache has room for.
        """
        # Read before any guess: a row may get what another one drew in this very step before.
        drafts = [self._updated(row) for row in rows]
        # A step takes as long as `free tokens + its tokens`: a guess pays if it stays more likely than this.
        least_chance = len(rows) / (self._free_tokens + len(rows)) if rows else 1
        spare, fed = self._rollout.max_running_rows - len(rows), []
        for num_left, row, draft in zip(range(len(rows), 0, -1), rows, drafts, strict=True):
            most = min(
                self._rollout.draft_tokens,
                int(math.log(least_chance) / math.log(draft.chance)),
                max(0, -(-spare // num_left)),
                row.request.sampling.max_tokens - len(row.token_ids) - 1,
            )
            tokens = draft.texts.guess(draft.tokens, most) if most else []
            draft.num_fed = room_behind(row, len(tokens))
            spare -= draft.num_fed
            newest = newest_token(row)
            fed.append(newest)
            for place, token in enumerate(tokens[: draft.num_fed], start=newest.length + 1):
                fed.append(FedToken(row, token, place))
        return fed

    def forget(self, row: Row) -> None:
        """Drop a row that ended."""
        if row in self._rows:
            draft = self._updated(row)
            del self._rows[row]
            draft.texts.num_rows -= 1
            if not draft.texts.num_rows:
                del self._texts[id(row.request)]

    def clear(self) -> None:
        """Drop all rows."""
        self._rows.clear()
        self._texts.clear()

    def take_counts(self) -> tuple[int, int]:
        """Tokens guessed since the last call, and those of them that stayed."""
        taken, self._counts = self._counts, (0, 0)
        return taken

    def _updated(self, row: Row) -> _RowDrafts:
        draft = self._rows.get(row)
        if draft is None:
            texts = self._texts_of(row.request)
            texts.num_rows += 1
            draft = self._rows[row] = _RowDrafts(texts, list(row.request.prompt_ids))
        new = row.token_ids[len(draft.tokens) - len(row.request.prompt_ids) :]
        # A row that was preempted meanwhile has drawn once more.
        num_stayed = min(len(new) - 1, draft.num_fed)
        self._counts = (self._counts[0] + draft.num_fed, self._counts[1] + num_stayed)
        draft.judge(num_stayed)
        draft.tokens += new
        draft.texts.add(draft.tokens, len(draft.tokens) - len(new))
        return draft

    def _texts_of(self, request: Request) -> _GroupTexts:
        """Those of the request's rows, which know the prompt from the start."""
        texts = self._texts.get(id(request))
        if texts is None:
            texts = self._texts[id(request)] = _GroupTexts(self._rollout.draft_match)
            texts.add(list(request.prompt_ids), 0)
        return texts
