"""Rows of a micro-batch compute what they have in common once: which tokens are computed, and where.

    rows             p0 p1 p2 a0 a1 a2 | p0 p1 p2 b0 b1 | p0 p1 p2 a0 a1 a3 | q0 q1 c0
    computed         p0 p1 p2 | q0 q1 | a0 a1 | b0         prompts and rows without company, then what follows prompts
    positions         0  1  2    0  1    3  4    3

The last token of a row, behind which nothing is rated, isn't computed; so the first and the third row above are the
same. Responses of equal tokens are frequent where a policy is sure of a short answer.

Shape letters: `B` rows, `A` packed tokens of all rows, `T` those that are computed, `P` places to rate. A *segment* is
a run of computed tokens: a prompt, what follows it in rows, or a whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmdrl.engines.models.kernels.prefixed import PrefixedRows
from spmdrl.engines.models.layers import Attend, PackedCausalAttention, SharedPromptAttention
from spmdrl.engines.training.batching.packed_rows import SharedLayout, TokenRows
from spmdrl.types import offsets_of
from spmdrl.types.partition import RowCost, shares_prompt
from spmdrl.types.roles import Rating


@dataclass(frozen=True)
class RowSharing:
    """What rows of one model may leave to others."""

    rating: Rating
    routes: bool
    """Whether tokens are sent to experts, whose load counts each of them."""

    def computed_lengths(self, rows: TokenRows) -> list[int]:
        """The tokens of each row [B] up to the last one that is rated, at least one; all of them where each counts."""
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
    """What each row computes: a prompt, and a run of tokens behind it; both may be those of an earlier row."""

    prompts_B: list[int]
    """The first row with the same prompt, sent to the same experts; the row's own number where it shares none."""
    runs_B: list[int]
    """The first row with the same run behind the same prompt."""
    prompt_lengths_B: list[int]
    run_lengths_B: list[int]

    @classmethod
    def of(cls, rows: TokenRows, sharing: RowSharing | None) -> RowParts:
        """Whether a row shares its prompt depends on no other row's length: those with a long run share none."""
        lengths = rows.lengths_B.tolist() if sharing is None else sharing.computed_lengths(rows)
        prompt_lengths = list(map(min, lengths, rows.prompt_lengths_B.tolist()))
        run_lengths = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
        own = list(range(len(rows)))
        if sharing is None:
            return cls(own, own, prompt_lengths, run_lengths)
        first: dict[tuple[bytes, bytes | None], int] = {}
        prompts, runs, starts = own.copy(), own.copy(), rows.offsets.tolist()
        for row, (prompt, run) in enumerate(zip(prompt_lengths, run_lengths, strict=True)):
            if shares_prompt(prompt, run):
                end = starts[row] + prompt
                key = _key(rows, slice(end - prompt, end))
                prompts[row] = first.setdefault((key, None), row)
                runs[row] = first.setdefault((key, _key(rows, slice(end, end + run))), row)
        return cls(prompts, runs, prompt_lengths, run_lengths)


def _key(rows: TokenRows, tokens: slice) -> bytes:
    """What the tokens compute follows from."""
    key = rows.tokens_T.numpy()[tokens].tobytes()
    return key if rows.experts_TLC is None else key + rows.experts_TLC.numpy()[tokens].tobytes()


@dataclass(frozen=True)
class RowBundle:
    """Rows that go through the model in one micro-batch."""

    rows: Sequence[int]
    num_tokens: int
    """Tokens that are computed."""
    cost: int


def bundle_rows(rows: TokenRows, cost: RowCost, *, max_tokens: int, sharing: RowSharing | None) -> list[RowBundle]:
    """Rows with the same prompt together, as many as keep the budget, else single units of rows.

    What a bundle computes is counted once.
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
        num_shared, whole = sum(prompts.values()), sum(map(cost.of, prompts.values()))
        for members in _within(max_tokens - num_shared, runs):
            held = {run: length for place in members for run, length in runs[place].items()}
            own = sum(
                cost.of(parts.prompt_lengths_B[run] + length) - cost.of(parts.prompt_lengths_B[run])
                for run, length in held.items()
            )
            found = [row for place in members for row in alike[place]]
            bundles.append(RowBundle(found, num_shared + sum(held.values()), whole + own))
    return bundles


def _within(budget: int, units: Sequence[dict[int, int]]) -> list[list[int]]:
    """Consecutive numbers of units in parts of at most so many tokens, unless a single one has more.

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
    """The layout of rows of one micro-batch; None where all of their tokens are computed."""
    parts = RowParts.of(rows, sharing)
    starts, prompts, runs = rows.offsets.tolist(), parts.prompt_lengths_B, parts.run_lengths_B
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(parts.prompts_B):
        groups.setdefault(number, []).append(row)
    first = {row: (starts[row], starts[row] + prompts[row] + runs[row] * (len(groups[row]) == 1)) for row in groups}
    behind = dict.fromkeys(
        run for alike in groups.values() if len(alike) > 1 for run in map(parts.runs_B.__getitem__, alike) if runs[run]
    )
    followers = [(starts[run] + prompts[run], starts[run] + prompts[run] + runs[run]) for run in behind]
    source_T = torch.cat([torch.arange(*segment) for segment in (*first.values(), *followers)])
    if source_T.numel() == rows.tokens_T.numel():
        return None
    offsets = offsets_of([stop - start for start, stop in (*first.values(), *followers)])
    prompt_segments = {row: segment for segment, row in enumerate(first)}
    run_segments = {run: segment for segment, run in enumerate(behind, len(first))}
    place_A = torch.full((rows.tokens_T.numel(),), -1)
    segments_BS = torch.zeros(len(rows), len(offsets) - 1)
    for row, (prompt, run) in enumerate(zip(parts.prompts_B, parts.runs_B, strict=True)):
        at = starts[row]
        for segment in [prompt_segments[prompt], *([run_segments[run]] if run in run_segments else [])]:
            places = torch.arange(offsets[segment], offsets[segment + 1])
            place_A[at : at + len(places)] = places
            segments_BS[row, segment] = 1
            at += len(places)
    prefixes = [prompt_segments[parts.prompts_B[run]] for run in behind]
    attend: Attend = PackedCausalAttention(offsets)
    if prefixes:
        behind_offsets = offsets[len(first) :]
        attend = SharedPromptAttention(
            PrefixedRows(offsets[: len(first) + 1], behind_offsets.diff().tolist(), prefixes)
        )
    segment_T = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    return SharedLayout(source_T, place_A, segment_T, segments_BS, attend)
