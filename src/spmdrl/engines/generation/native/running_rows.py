"""State of the native engine's running rows, and of groups that start from the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from spmdrl.engines.generation.protocol import Finish, Request, Response

CHOICES_DTYPE = torch.int16
Tables = list[list[int]]
"""Blocks of a row by kind of state, each in the order of positions; those behind a window are the scratch block."""


class ChoiceRecorder:
    """`Route` that records the router choices of one forward, unchanged."""

    def __init__(self) -> None:
        self._chosen: dict[int, Tensor] = {}

    def __call__(self, layer: int, scores_TE: Tensor, chosen_TC: Tensor) -> tuple[Tensor, Tensor]:
        assert scores_TE.shape[1] <= torch.iinfo(CHOICES_DTYPE).max, (
            f"{scores_TE.shape[1]} experts don't fit in {CHOICES_DTYPE}"
        )
        self._chosen[layer] = chosen_TC.to(CHOICES_DTYPE)
        return scores_TE, chosen_TC

    def take(self) -> Tensor:
        """Return the choices [T, L, C] of the last forward, on the host, and forget them; waits for the device."""
        taken = torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1).cpu()
        self._chosen.clear()
        return taken


class RowChoices:
    """Experts of one row's tokens, in the order in which they are fed, for training (R3, arXiv:2510.11370).

    The last token is never fed.
    """

    def __init__(self, first: Tensor):
        """Start with the choices [T, ...] of some tokens, which rows share and nothing may change."""
        self._first = first
        self._later: list[Tensor] = []

    def feed(self, token_LC: Tensor) -> None:
        """Append the choices of the newest fed token."""
        self._later.append(token_LC)

    def continued(self, fed_TLC: Tensor) -> RowChoices:
        """Return a copy, extended by the choices of new tokens; `fed_TLC` has those of all tokens from the first.

        Tokens fed a second time keep the choices from when they were drawn from.
        """
        num_known = len(self._first) + len(self._later)
        return RowChoices(torch.cat((self.packed().view(num_known, -1), fed_TLC[num_known:].flatten(1))))

    def packed(self) -> Tensor:
        """Return all choices so far, flat: for each fed token, its experts in each sparse layer."""
        parts = [self._first.flatten()]
        if self._later:
            parts.append(torch.stack(self._later).flatten())
        return torch.cat(parts)


@dataclass(eq=False)
class Branch:
    """Running rows of a group whose tokens are the same so far, oldest first: each token is fed once for all of them.

    They draw their next tokens from the same logits, and rows that draw another one leave it.
    """

    rows: list[Row]
    tables: Tables
    """Blocks of its positions; held once, whatever the number of rows."""

    @property
    def first(self) -> Row:
        return self.rows[0]

    def parts(self) -> list[list[Row]]:
        """Group the rows by their newest token, in the order of first occurrence."""
        by_token: dict[int, list[Row]] = {}
        for row in self.rows:
            by_token.setdefault(row.token_ids[-1], []).append(row)
        return list(by_token.values())


@dataclass(eq=False)
class Row:
    """A row: its tokens so far and, while it runs, its branch."""

    row: int
    seed: int
    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    branch: Branch | None = None
    choices: RowChoices | None = None
    """Experts of the tokens fed so far, if recorded."""
    num_ahead: int = 0
    """Number of its tokens on the device that the host hasn't read."""

    @property
    def tables(self) -> Tables:
        """Blocks of its positions while it runs."""
        assert self.branch is not None, f"row {self.row} doesn't run"
        return self.branch.tables

    @property
    def is_first(self) -> bool:
        """True if it runs, and is fed for its branch."""
        return self.branch is not None and self.branch.first is self

    @property
    def length(self) -> int:
        """Positions of the prompt and of all its tokens, the newest included."""
        return len(self.request.prompt_ids) + len(self.token_ids) + self.num_ahead

    @property
    def is_full(self) -> bool:
        """True if it has all the tokens that it may have, counting those unread by the host."""
        return len(self.token_ids) + self.num_ahead >= self.request.sampling.max_tokens

    @property
    def finish(self) -> Finish | None:
        """Reason for the row to end with its newest token, whatever its text, or None if it continues."""
        sampling = self.request.sampling
        if self.token_ids and self.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= sampling.max_tokens else None

    def response(self, finish: Finish) -> Response:
        choices = None if self.choices is None else self.choices.packed()
        return Response(self.row, tuple(self.token_ids), tuple(self.logprobs), finish, tuple(self.versions), choices)


@dataclass(eq=False)
class FedToken:
    """A row's newest token, which a decoding step feeds."""

    row: Row
    token: int
    length: int
    """Positions up to the token, its own included."""
    choices: Tensor | None = None
    """Experts of the token [L, C], if recorded; set by the forward."""

    def take_choices(self) -> None:
        """Append the choices to the rows that the token was fed for, if recorded."""
        if self.choices is not None and self.row.branch is not None:
            for row in self.row.branch.rows:
                if row.choices is not None:
                    row.choices.feed(self.choices)


@dataclass(eq=False)
class Group:
    """Waiting rows that start from the same tokens, which are computed once for all of them.

    They are a request's rows without tokens, or one row that already has tokens.
    """

    rows: list[Row]
    """Rows that still wait, in order."""
    tables: Tables = field(default_factory=list)
    """Blocks of the tokens, held from the first chunk until the last row has started; empty before."""
    num_computed: int = 0
    """Leading tokens whose keys and values are cached or come with this step's chunks."""
    logits_V: Tensor | None = None
    """Logits after the last token, set when the last chunk runs."""
    choices: list[Tensor] = field(default_factory=list)
    """Experts of each chunk's tokens [T, L, C], if recorded; set likewise."""

    @property
    def request(self) -> Request:
        return self.rows[0].request

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and tokens that any of the rows starts from."""
        return (*self.request.prompt_ids, *self.rows[0].token_ids)

    @property
    def length(self) -> int:
        return self.rows[0].length


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a group, to run after those before them."""

    group: Group
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.stop == self.group.length


@dataclass(frozen=True)
class Admission:
    """Rows of one group that start once its last chunk has run."""

    group: Group
    rows: list[Row]

    def take_choices(self) -> None:
        """Append the expert choices of the tokens that the rows start from, if recorded."""
        if self.group.choices:
            fed_TLC = torch.cat(self.group.choices)
            self.group.choices[:] = [fed_TLC]
            for row in self.rows:
                row.choices = RowChoices(fed_TLC) if row.choices is None else row.choices.continued(fed_TLC)


def rows_of(request: Request) -> list[Row]:
    """Return the request's rows, with their partial responses."""
    rows = []
    for number, seed, given in zip(request.rows, request.seeds, request.given, strict=True):
        row = Row(number, seed, request, list(given.token_ids), list(given.logprobs), list(given.versions))
        if given.choices is not None and row.token_ids:
            row.choices = RowChoices(given.choices.view(row.length - 1, -1))
        rows.append(row)
    return rows


def groups_of(request: Request) -> list[Group]:
    """Group the request's rows: each one with tokens by itself, then the others together."""
    rows = rows_of(request)
    groups = [Group([row]) for row in rows if row.token_ids]
    fresh = [row for row in rows if not row.token_ids]
    return [*groups, Group(fresh)] if fresh else groups


def check_request(request: Request, *, max_positions: int, reads_text: bool) -> None:
    """Raise ValueError if the model or the engine can't serve it."""
    num_prompt, num_new = len(request.prompt_ids), request.sampling.max_tokens
    if num_prompt + num_new > max_positions:
        raise ValueError(
            f"row {request.rows[0]} has {num_prompt} prompt + at most {num_new} new tokens = {num_prompt + num_new}, "
            f"but the model was made for {max_positions} positions; lower data.max_prompt_length or "
            "rollout.max_completion_length"
        )
    if request.sampling.stop_strings and not reads_text:
        raise ValueError(
            f"rows {list(request.rows)} have stop strings {list(request.sampling.stop_strings)}, but the engine was "
            "built without the text of tokens; give it decode"
        )
