"""Common tokens of a micro-batch's rows, computed once: selection and layout.

    rows             p0 p1 p2 a0 a1 a2 | p0 p1 p2 b0 b1 | p0 p1 p2 a0 a1 a3 | q0 q1 c0
    computed         p0 p1 p2 | q0 q1 | a0 a1 | b0         prompts and rows without company, then what follows prompts
    positions         0  1  2    0  1    3  4    3

A row's last token, after which nothing is rated, isn't computed; so the first and the third row above are the same.
Responses of equal tokens are frequent if a policy is sure of a short answer.

Shape letters: `B` rows, `A` packed tokens of all rows, `T` computed tokens, `P` places to rate. A *segment* is a run of
computed tokens: a prompt, a run after it in rows, or a whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spmdrl.engines.models.kernels.prefixed import PrefixedRows
from spmdrl.engines.models.layers import Mix, PackedCausalAttention, SharedPromptAttention
from spmdrl.engines.training.packed_rows import SharedLayout, TokenRows
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.partition import RowCost, shares_prompt
from spmdrl.nouns.roles import Rating


@dataclass(frozen=True)
class RowSharing:
    """Rules of sharing between the rows of a model."""

    rating: Rating
    routes: bool
    """True if tokens are sent to experts, whose load counts each of them."""

    def computed_lengths(self, rows: TokenRows) -> list[int]:
        """Count each row's tokens up to the last rated one, at least one [B]; all tokens if each counts."""
        if self.routes:
            return rows.lengths_B.tolist()
        places_P, bounds = rows.rated_places(self.rating), rows.response_offsets
        if self.rating == "row_values":
            bounds = torch.arange(len(rows) + 1)
        last_B = rows.offsets[:-1].clone()
        is_rated_B = bounds.diff() > 0
        last_B[is_rated_B] = places_P[bounds[1:][is_rated_B] - 1]
        return (last_B - rows.offsets[:-1] + 1).tolist()


@dataclass(frozen=True)
class RowParts:
    """Parts that each row computes: a prompt, and a run of tokens after it; both may be an earlier row's."""

    prompts_B: list[int]
    """First row with the same prompt, sent to the same experts; the row's own number if it shares none."""
    runs_B: list[int]
    """First row with the same run after the same prompt."""
    prompt_lengths_B: list[int]
    run_lengths_B: list[int]

    @classmethod
    def of(cls, rows: TokenRows, sharing: RowSharing | None) -> RowParts:
        """Find shared parts by rows alone: whether a row shares its prompt depends on no other row's length."""
        lengths = rows.lengths_B.tolist() if sharing is None else sharing.computed_lengths(rows)
        prompt_lengths = list(map(min, lengths, rows.prompt_lengths_B.tolist()))
        run_lengths = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
        own = list(range(len(rows)))
        if sharing is None:
            return cls(own, own, prompt_lengths, run_lengths)
        first: dict[tuple[bytes, bytes | None], int] = {}
        prompts, runs, starts, key_of = own.copy(), own.copy(), rows.offsets.tolist(), _keys_of(rows)
        for row, (prompt, run) in enumerate(zip(prompt_lengths, run_lengths, strict=True)):
            if shares_prompt(prompt, run):
                end = starts[row] + prompt
                key = key_of(end - prompt, end)
                prompts[row] = first.setdefault((key, None), row)
                runs[row] = first.setdefault((key, key_of(end, end + run)), row)
        return cls(prompts, runs, prompt_lengths, run_lengths)


def _keys_of(rows: TokenRows) -> Callable[[int, int], bytes]:
    """Return a function of two places whose key determines the results of the tokens between them."""
    # Cut out of one copy: slicing a tensor would take ten times as long per piece.
    tokens, width = rows.tokens_T.numpy().tobytes(), rows.tokens_T.itemsize
    if rows.experts_TLC is None:
        return lambda start, stop: tokens[start * width : stop * width]
    experts, size = rows.experts_TLC.numpy().tobytes(), rows.experts_TLC[:1].nbytes
    return lambda start, stop: tokens[start * width : stop * width] + experts[start * size : stop * size]


@dataclass(frozen=True)
class RowBundle:
    """Rows that go through the model in one micro-batch."""

    rows: Sequence[int]
    num_tokens: int
    """Computed tokens, and attention's copies of a prompt for each run after it."""
    cost: int


# Share of a computed token's memory for backward that is its query, key, value and attention output; attention keeps
# them again for each run after a shared prompt.
_KEPT_OF_COPIES = 0.2


def bundle_rows(rows: TokenRows, cost: RowCost, *, max_tokens: int, sharing: RowSharing | None) -> list[RowBundle]:
    """Bundle rows with the same prompt, as many as fit the budget, else single units of rows.

    A bundle's shared tokens are counted once.
    """
    parts = RowParts.of(rows, sharing)
    units: dict[tuple[int, ...], list[range]] = {}
    for start in range(0, len(rows), rows.unit_size):
        unit = range(start, start + rows.unit_size)
        units.setdefault(tuple(parts.prompts_B[row] for row in unit), []).append(unit)
    bundles = []
    for key, alike in units.items():
        prompts = {number: parts.prompt_lengths_B[number] for number in key}
        runs = [{parts.runs_B[row]: parts.run_lengths_B[row] for row in unit} for unit in alike]
        copies = {run: int(_KEPT_OF_COPIES * parts.prompt_lengths_B[run]) for unit in runs for run in unit}
        num_shared, whole = sum(prompts.values()), sum(map(cost.of, prompts.values()))
        held_runs = [{run: length + copies[run] for run, length in unit.items()} for unit in runs]
        for members in _within(max_tokens - num_shared, held_runs):
            held = {run: length for place in members for run, length in runs[place].items()}
            own = sum(
                cost.of(parts.prompt_lengths_B[run] + length) - cost.of(parts.prompt_lengths_B[run])
                for run, length in held.items()
            )
            found = [row for place in members for row in alike[place]]
            num_copies = sum(copies[run] for run in held) if len(members) > 1 else 0
            bundles.append(RowBundle(found, num_shared + sum(held.values()) + num_copies, whole + own))
    return bundles


def _within(budget: int, units: Sequence[dict[int, int]]) -> list[list[int]]:
    """Split consecutive units into parts of at most `budget` tokens, unless a single unit has more.

    Units hold runs with their numbers of tokens; a run counts once in a part.
    """
    members: list[list[int]] = []
    held: dict[int, int] = {}
    for number, runs in enumerate(units):
        held = held | runs
        if not members or sum(held.values()) > budget:
            members.append([])
            held = runs
        members[-1].append(number)
    return members


def lay_out(rows: TokenRows, sharing: RowSharing) -> SharedLayout | None:
    """Return the layout of rows of one micro-batch; None if all of their tokens are computed."""
    segments = Segments.of(rows, RowParts.of(rows, sharing))
    if segments.num_tokens == rows.tokens_T.numel():
        return None
    offsets, lengths_S = segments.offsets, segments.lengths_S
    num_first = len(lengths_S) - len(segments.prefixes)
    place_A = torch.full((rows.tokens_T.numel(),), -1)
    segments_BS = torch.zeros(len(rows), len(lengths_S))
    starts_B = rows.offsets[:-1]
    for segment_B in (segments.prompts_B, segments.runs_B):
        has_one = segment_B >= 0
        segment, at = segment_B[has_one], starts_B[has_one]
        place_A[_numbers(at, lengths_S[segment])] = _numbers(offsets[segment], lengths_S[segment])
        segments_BS[has_one.nonzero().squeeze(1), segment] = 1
        # A run follows its row's prompt.
        starts_B = starts_B + lengths_S[segments.prompts_B]
    attend: Mix = PackedCausalAttention(offsets)
    if segments.prefixes:
        attend = SharedPromptAttention(
            PrefixedRows(offsets[: num_first + 1], lengths_S[num_first:].tolist(), segments.prefixes)
        )
    segment_T = torch.arange(len(lengths_S)).repeat_interleave(lengths_S)
    return SharedLayout(_numbers(segments.starts_S, lengths_S), place_A, segment_T, segments_BS, attend)


@dataclass(frozen=True)
class Segments:
    """Segments (S) of a micro-batch, in the order of computation."""

    starts_S: Tensor
    """First packed token of each."""
    lengths_S: Tensor
    prompts_B: Tensor
    """Each row's first segment: its prompt, or all of it."""
    runs_B: Tensor
    """Each row's second segment, or -1."""
    prefixes: list[int]
    """Segments before the last ones, which follow prompts."""

    @classmethod
    def of(cls, rows: TokenRows, parts: RowParts) -> Segments:
        """Order prompts and whole rows by their first rows, then the runs after each prompt, again by first rows."""
        own_B, starts_B = torch.arange(len(rows)), rows.offsets[:-1]
        prompts_B, runs_B = torch.tensor(parts.prompts_B), torch.tensor(parts.runs_B)
        prompt_lengths_B, run_lengths_B = torch.tensor(parts.prompt_lengths_B), torch.tensor(parts.run_lengths_B)
        in_company_B = prompts_B.bincount(minlength=len(rows))[prompts_B] > 1
        first = (prompts_B == own_B).nonzero().squeeze(1)
        behind = ((runs_B == own_B) & in_company_B & (run_lengths_B > 0)).nonzero().squeeze(1)
        behind = behind[prompts_B[behind].argsort(stable=True)]
        lengths_F = prompt_lengths_B[first] + run_lengths_B[first].where(~in_company_B[first], 0)
        segment_of_prompt, segment_of_run = torch.full_like(own_B, -1), torch.full_like(own_B, -1)
        segment_of_prompt[first] = torch.arange(len(first))
        segment_of_run[behind] = torch.arange(len(first), len(first) + len(behind))
        return cls(
            torch.cat((starts_B[first], starts_B[behind] + prompt_lengths_B[behind])),
            torch.cat((lengths_F, run_lengths_B[behind])),
            segment_of_prompt[prompts_B],
            segment_of_run[runs_B],
            segment_of_prompt[prompts_B[behind]].tolist(),
        )

    @cached_property
    def offsets(self) -> Tensor:
        return offsets_of(self.lengths_S)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])


def _numbers(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the numbers from each start on, as many as its length."""
    offsets = offsets_of(lengths)
    return torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths)
