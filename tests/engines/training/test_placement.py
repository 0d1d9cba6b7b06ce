"""Where tokens go on the context ranks, over all sizes and kinds, and which rank predicts which response tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.engines.training.batching.packed_rows import TokenRows, to_microbatch
from spmdrl.engines.training.context.local_tokens import local_tokens, own_predictions
from spmdrl.engines.training.context.token_placement import Placement, place_tokens, placed_size
from spmdrl.types import offsets_of
from tests.engines.training.tiny import axis_of

lengths_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=8)
kinds = st.sampled_from(["ring", "ulysses"])
sizes = st.sampled_from([1, 2, 3, 4])
multiples = st.sampled_from([1, 2, 3])


def placements(lengths: list[int], size: int, kind: str, **options: int) -> list[Placement]:
    """Each rank's."""
    return [place_tokens(offsets_of(lengths), axis_of("context", size, rank), kind, **options) for rank in range(size)]


def random_rows(lengths: list[int], seed: int = 0) -> TokenRows:
    generator = torch.Generator().manual_seed(seed)
    prompts_B = torch.tensor([int(torch.randint(1, length + 1, (), generator=generator)) for length in lengths])
    tokens_T = torch.randint(1, 100, (sum(lengths),), generator=generator)
    return TokenRows(tokens_T, offsets_of(lengths), prompts_B)


@given(lengths_of_rows, sizes, kinds, multiples, st.integers(0, 3))
def test_every_token_has_one_place_on_one_rank_and_all_ranks_hold_as_many(
    lengths: list[int], size: int, kind: str, multiple: int, more: int
) -> None:
    num_tokens = placed_size(offsets_of(lengths), size, kind, multiple) + more * size * multiple
    ranks = placements(lengths, size, kind, multiple=multiple, num_tokens=num_tokens)
    sources = torch.cat([placement.source_P[placement.own_t] for placement in ranks])
    assert sorted(sources[sources >= 0].tolist()) == list(range(sum(lengths)))
    assert [len(placement.own_t) for placement in ranks] == [num_tokens // size] * size
    assert num_tokens // size % multiple == 0


@given(lengths_of_rows, sizes, kinds, multiples)
def test_little_is_padded_unless_more_is_asked_for(lengths: list[int], size: int, kind: str, multiple: int) -> None:
    placement = placements(lengths, size, kind, multiple=multiple)[0]
    in_rows = (2 * size - 1) * len(lengths) if kind == "ring" and size > 1 else 0
    assert placement.num_places - sum(lengths) < in_rows + size * multiple
    assert placement.is_identity == (size == 1 and sum(lengths) % multiple == 0)


@given(lengths_of_rows, st.sampled_from([2, 3, 4]))
def test_a_ring_leaves_every_rank_the_same_causal_work(lengths: list[int], size: int) -> None:
    work = []
    for placement in placements(lengths, size, "ring"):
        own = placement.own_t[placement.own_t < int(placement.offsets[-1])]
        row = torch.searchsorted(placement.offsets, own, right=True) - 1
        work.append(int((own - placement.offsets[row] + 1).sum()))
    assert len(set(work)) == 1


def test_long_rows_are_balanced_without_their_padding_too() -> None:
    offsets = offsets_of([1001, 2503, 777])
    work = []
    for placement in placements([1001, 2503, 777], 4, "ring"):
        sources = placement.source_P[placement.own_t]
        sources = sources[sources >= 0]
        work.append(int((sources - offsets[torch.searchsorted(offsets, sources, right=True) - 1] + 1).sum()))
    assert max(work) / min(work) < 1.03


@given(lengths_of_rows, sizes, kinds)
def test_own_tokens_keep_their_values_rows_and_positions(lengths: list[int], size: int, kind: str) -> None:
    rows = random_rows(lengths)
    micro = to_microbatch(rows, torch.device("cpu"))
    row_of_token_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    for placement in placements(lengths, size, kind, multiple=2):
        local = local_tokens(placement, rows, micro)
        source_t = placement.source_P[placement.own_t]
        real = source_t >= 0
        assert torch.equal(local.tokens_t[real], rows.tokens_T[source_t[real]])
        assert torch.equal(local.positions_t[real], micro.positions_T[source_t[real]])
        assert torch.equal(local.row_t[real], row_of_token_T[source_t[real]])
        padding = torch.stack([local.tokens_t, local.positions_t, local.row_t + 1])[:, ~real]
        assert not padding.any()


@given(lengths_of_rows, sizes, kinds, st.integers(0, 99))
def test_every_response_token_is_predicted_once_by_the_token_before_it(
    lengths: list[int], size: int, kind: str, seed: int
) -> None:
    rows = random_rows(lengths, seed)
    micro = to_microbatch(rows, torch.device("cpu"))
    ranks = placements(lengths, size, kind)
    predictions = [own_predictions(placement, rows.rated_places("logprobs")) for placement in ranks]
    for placement, own in zip(ranks, predictions, strict=True):
        predicting = placement.source_P[placement.own_t][own.predicting_p]
        assert torch.equal(predicting, micro.predicting_R[own.response_p])
        assert own.counts == tuple(len(other.response_p) for other in predictions)
    gathered = torch.cat([own.response_p for own in predictions])
    assert torch.equal(gathered[predictions[0].order_R], torch.arange(rows.num_response_tokens))


def test_one_rank_computes_the_packed_tokens_themselves() -> None:
    rows = random_rows([3, 9, 1])
    micro = to_microbatch(rows, torch.device("cpu"))
    local = local_tokens(place_tokens(rows.offsets, axis_of("context"), "ring"), rows, micro)
    assert local.tokens_t is micro.tokens_T and local.positions_t is micro.positions_T
    values = torch.arange(rows.num_response_tokens)
    assert local.scores_to_R(values) is values
    assert torch.equal(local.predicting_p, micro.predicting_R) and torch.equal(local.targets_p, micro.targets_R)


@settings(max_examples=10, deadline=None)
@given(lengths_of_rows, st.integers(1, 9))
def test_padding_behind_the_rows_changes_no_attention(lengths: list[int], num_padding: int) -> None:
    num_tokens = sum(lengths)
    rows = random_rows(lengths)
    placement = place_tokens(rows.offsets, axis_of("context"), "ring", num_tokens=num_tokens + num_padding)
    local = local_tokens(placement, rows, to_microbatch(rows, torch.device("cpu")))
    inputs = [torch.randn(num_tokens + num_padding, heads, 4) for heads in (4, 2, 2)]
    expected = PackedCausalAttention(rows.offsets)(0, *(heads[:num_tokens] for heads in inputs))
    attended = local.attend(0, *inputs)
    assert torch.equal(attended[:num_tokens], expected) and not attended[num_tokens:].any()


def test_a_size_that_rows_do_not_fit_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        place_tokens(offsets_of([5, 6]), axis_of("context", 2, 0), "ring", num_tokens=12)
