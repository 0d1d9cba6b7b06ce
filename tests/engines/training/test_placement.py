"""Where tokens go on the context ranks, over all sizes and kinds, and which rank predicts which response tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.engines.training.context.context_parallel import GatherRatings, share_of
from spmdrl.engines.training.context.token_placement import Placement, num_places, place_tokens
from spmdrl.engines.training.packed_rows import MicroBatch, TokenRows, to_microbatch
from spmdrl.nouns.batch import offsets_of
from tests.engines.training.tiny import axis_of

lengths_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=8)
kinds = st.sampled_from(["ring", "ulysses"])
sizes = st.sampled_from([1, 2, 3, 4])
fillings = st.integers(0, 3)


def placements(lengths: list[int], size: int, kind: str, filling: int = 0) -> list[Placement]:
    """Each rank's, with so many places more than are needed."""
    offsets = offsets_of(lengths)
    total = (-(-num_places(offsets, size, kind) // size) + filling) * size
    return [place_tokens(offsets, axis_of("context", size, rank), kind, size=total) for rank in range(size)]


def random_rows(lengths: list[int], seed: int = 0) -> TokenRows:
    generator = torch.Generator().manual_seed(seed)
    prompts_B = torch.tensor([int(torch.randint(1, length + 1, (), generator=generator)) for length in lengths])
    tokens_T = torch.randint(1, 100, (sum(lengths),), generator=generator)
    return TokenRows(tokens_T, offsets_of(lengths), prompts_B)


def on_host(rows: TokenRows) -> MicroBatch:
    return to_microbatch(rows, range(len(rows)), torch.device("cpu"), "logprobs")


def shares(rows: TokenRows, ranks: list[Placement]) -> list[MicroBatch]:
    """What each rank runs."""
    return [share_of(on_host(rows), rows.rated_places("logprobs"), placement) for placement in ranks]


@given(lengths_of_rows, sizes, kinds, fillings)
def test_every_token_has_one_place_on_one_rank_and_all_ranks_hold_as_many(
    lengths: list[int], size: int, kind: str, filling: int
) -> None:
    ranks = placements(lengths, size, kind, filling)
    sources = torch.cat([placement.source_T for placement in ranks])
    assert sorted(sources[sources >= 0].tolist()) == list(range(sum(lengths)))
    assert len({len(placement.own_T) for placement in ranks}) == 1


@given(lengths_of_rows, sizes, kinds)
def test_little_is_padded_unless_more_is_asked_for(lengths: list[int], size: int, kind: str) -> None:
    in_rows = (2 * size - 1) * len(lengths) if kind == "ring" and size > 1 else 0
    assert 0 <= num_places(offsets_of(lengths), size, kind) - sum(lengths) <= in_rows


@given(lengths_of_rows, st.sampled_from([2, 3, 4]))
def test_a_ring_leaves_every_rank_the_same_causal_work(lengths: list[int], size: int) -> None:
    work = []
    for placement in placements(lengths, size, "ring"):
        own = placement.own_T[placement.own_T < int(placement.offsets[-1])]
        row = torch.searchsorted(placement.offsets, own, right=True) - 1
        work.append(int((own - placement.offsets[row] + 1).sum()))
    assert len(set(work)) == 1


def test_long_rows_are_balanced_without_their_padding_too() -> None:
    offsets = offsets_of([1001, 2503, 777])
    work = []
    for placement in placements([1001, 2503, 777], 4, "ring"):
        sources = placement.source_T[placement.source_T >= 0]
        work.append(int((sources - offsets[torch.searchsorted(offsets, sources, right=True) - 1] + 1).sum()))
    assert max(work) / min(work) < 1.03


@given(lengths_of_rows, sizes, kinds, fillings)
def test_own_tokens_keep_their_values_rows_and_positions(
    lengths: list[int], size: int, kind: str, filling: int
) -> None:
    rows = random_rows(lengths)
    whole = on_host(rows)
    for micro in shares(rows, placements(lengths, size, kind, filling)):
        real, source = micro.source_T >= 0, micro.source_T[micro.source_T >= 0]
        for own_T, values_A, padding in (
            (micro.tokens_T, whole.tokens_T, 0),
            (micro.positions_T, whole.positions_T, 0),
            (micro.row_T, whole.row_T, -1),
        ):
            assert torch.equal(own_T[real], values_A[source]) and bool((own_T[~real] == padding).all())


@given(lengths_of_rows, st.sampled_from([2, 3, 4]), kinds, st.integers(0, 99))
def test_every_response_token_is_predicted_once_by_the_token_before_it(
    lengths: list[int], size: int, kind: str, seed: int
) -> None:
    rows = random_rows(lengths, seed)
    whole = on_host(rows)
    ranks = shares(rows, placements(lengths, size, kind))
    gathers = [micro.gather_R for micro in ranks]
    assert all(isinstance(gather, GatherRatings) for gather in gathers)
    predicting = torch.cat([micro.source_T[micro.places_P] for micro in ranks])
    targets = torch.cat([micro.targets_P for micro in ranks])
    for gather in gathers:
        assert gather.counts == tuple(len(micro.places_P) for micro in ranks)
        assert torch.equal(predicting[gather.order_R], whole.places_P)
        assert torch.equal(targets[gather.order_R], whole.targets_P)


def test_two_ranks_of_a_ring_share_two_rows_as_the_drawing_says() -> None:
    a0, a1, a2, a3, a4, b0, b1, b2, none = *range(10, 18), 0
    rows = TokenRows(torch.tensor([a0, a1, a2, a3, a4, b0, b1, b2]), offsets_of([5, 3]), torch.tensor([2, 1]))
    first, second = shares(rows, placements([5, 3], 2, "ring"))
    assert first.tokens_T.tolist() == [a0, a1, none, none, b0, none]
    assert second.tokens_T.tolist() == [a2, a3, a4, none, b1, b2]
    assert (first.places_P.tolist(), second.places_P.tolist()) == ([1, 4], [0, 1, 4])
    joined = torch.cat((first.targets_P, second.targets_P))
    assert joined.tolist() == [a2, b1, a3, a4, b2]
    assert joined[first.gather_R.order_R].tolist() == [a2, a3, a4, b1, b2]


@settings(max_examples=10, deadline=None)
@given(lengths_of_rows, st.integers(1, 9))
def test_padding_behind_the_rows_changes_no_attention(lengths: list[int], num_padding: int) -> None:
    num_tokens = sum(lengths)
    rows = random_rows(lengths)
    (micro,) = shares(rows, placements(lengths, 1, "ring", num_padding))
    inputs = [torch.randn(num_tokens + num_padding, heads, 4) for heads in (4, 2, 2)]
    expected = PackedCausalAttention(rows.offsets)(0, *(heads[:num_tokens] for heads in inputs))
    attended = micro.attend(0, *inputs)
    assert torch.equal(attended[:num_tokens], expected) and not attended[num_tokens:].any()


def test_a_size_that_rows_do_not_fit_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        place_tokens(offsets_of([5, 6]), axis_of("context", 2, 0), "ring", size=12)
