from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.dataflow.resharding.planning.cells import cut
from spmdrl.dataflow.resharding.planning.plan import plan_resharding
from spmdrl.nouns.batch import WeightSlice
from tests.bench.resharding.plan_bytes import least_bytes
from tests.dataflow.resharding.tables import fsdp_slices, whole_slices

names = st.sampled_from(["embed", "layer.0", "layer.1", "norm"])
shapes_drawn = st.dictionaries(
    names, st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
)


def grid(shape: tuple[int, ...], draw) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A random partition of a weight into a grid of boxes."""
    axes = []
    for length in shape:
        inner = draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else set()
        axes.append(list(itertools.pairwise([0, *sorted(inner), length])))
    return [(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in itertools.product(*axes)]


@st.composite
def layouts(draw):
    """A world of up to 8 ranks: each box of the source on one or more ranks, any boxes wanted by any ranks."""
    num_ranks = draw(st.integers(1, 8))
    shapes = draw(shapes_drawn)
    source = {rank: [] for rank in range(num_ranks)}
    target = {rank: [] for rank in range(num_ranks)}
    ranks = st.integers(0, num_ranks - 1)
    for name, shape in shapes.items():
        for starts, stops in grid(shape, draw):
            for rank in draw(st.sets(ranks, min_size=1, max_size=3)):
                source[rank].append(WeightSlice(name, starts, stops))
        for starts, stops in grid(shape, draw):
            for rank in draw(st.sets(ranks, max_size=num_ranks)):
                target[rank].append(WeightSlice(name, starts, stops))
    return source, target, shapes


def elements(boxes) -> list[tuple]:
    """Every element of the boxes as (name, index), with repetition."""
    return [(box.name, index) for box in boxes for index in itertools.product(*map(range, box.starts, box.stops))]


ELEMENT_BYTES = {"embed": 2, "layer.0": 4, "layer.1": 2, "norm": 8}


def num_bytes(boxes) -> int:
    return sum(ELEMENT_BYTES[box.name] * box.num_elements for box in boxes)


@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(128, 4096), st.sampled_from([None, 1, 2, 4]))
def test_every_generation_weight_is_received_exactly_once(layout, bucket_bytes, ranks_per_node):
    source, target, shapes = layout
    plan = plan_resharding(source, target, shapes, bucket_bytes, ELEMENT_BYTES, ranks_per_node=ranks_per_node)
    for rank in target:
        block = plan.block_of(rank)
        received = [t for bucket in block.buckets for t in plan.transfers(bucket) if t.receiver == rank]
        kept = [p.box for b in block.buckets for p in b.pieces if rank in p.holders and rank in p.wanters]
        got = elements([*kept, *(t.box for t in received)])
        assert sorted(got) == sorted(elements(target[rank]))
        held = {sender: set(elements(source[sender])) for sender in source}
        assert all(held[t.sender].issuperset(elements([t.box])) for t in received)
        mine = held[rank]
        assert not mine.intersection(elements(t.box for t in received)), "a rank was sent what it holds"
        lacking = set(elements(target[rank])) - mine
        assert least_bytes(plan)[rank] == sum(ELEMENT_BYTES[name] for name, _ in lacking)


@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(128, 1024))
def test_buckets_stay_within_their_bytes_and_the_plan_is_a_function_of_its_input(layout, bucket_bytes):
    source, target, shapes = layout
    plan = plan_resharding(source, target, shapes, bucket_bytes, ELEMENT_BYTES)
    shuffled = {rank: list(reversed(source[rank])) for rank in reversed(source)}
    assert plan == plan_resharding(shuffled, target, shapes, bucket_bytes, ELEMENT_BYTES)
    order = list(shapes)
    for block in plan.blocks:
        for bucket in block.buckets:
            moved = dict.fromkeys(block.ranks, 0)
            contributed = dict.fromkeys(block.ranks, 0)
            for piece in bucket.pieces:
                for rank in piece.wanters:
                    moved[rank] += num_bytes([piece.box])
                if piece.is_missing:
                    contributed[piece.contributor] += num_bytes([piece.box])
            for transfer in plan.transfers(bucket):
                moved[transfer.sender] += num_bytes([transfer.box])
            busiest = max(max(moved.values()), len(block.ranks) * max(contributed.values()))
            assert bucket.num_bytes == busiest <= bucket_bytes
        sequence = [order.index(piece.box.name) for bucket in block.buckets for piece in bucket.pieces]
        assert sequence == sorted(sequence)
        finished = [name for bucket in block.buckets for name in bucket.finished]
        assert len(finished) == len(set(finished)) == len(set(sequence))


@given(st.integers(0, 9), st.integers(1, 8))
def test_fsdp_slices_follow_torch_chunk(rows, shard_size):
    whole = torch.arange(rows * 2).view(rows, 2)
    chunks = list(whole.chunk(shard_size)) if rows else []
    for rank in range(shard_size):
        (box,) = fsdp_slices({"w": (rows, 2)}, shard_size, rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert whole[box.starts[0] : box.stops[0]].tolist() == expected


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.integers(1, 40))
def test_parts_of_a_cut_box_cover_it_once(shape, num_parts):
    box = WeightSlice("w", (0,) * len(shape), shape)
    parts = cut(box, num_parts)
    assert sorted(elements(parts)) == elements([box])
    assert len(parts) >= min(num_parts, box.num_elements)


def test_replicas_of_the_update_weights_exchange_only_among_themselves():
    shapes = {"w": (8, 2), "b": (3,)}
    source = {rank: fsdp_slices(shapes, 2, rank % 2) for rank in range(6)}
    target = {rank: whole_slices(shapes) for rank in range(6)}
    plan = plan_resharding(source, target, shapes, 1 << 20, 4)
    assert [block.ranks for block in plan.blocks] == [range(0, 2), range(2, 4), range(4, 6)]


def test_a_holder_on_the_same_node_sends_and_holders_take_turns():
    shapes = {f"w{i}": (4,) for i in range(12)}
    holders = (0, 1, 4, 5)
    source = {rank: whole_slices(shapes) if rank in holders else [] for rank in range(8)}
    target = {rank: whole_slices(shapes) for rank in (3, 6, 7)}
    plan = plan_resharding(source, target, shapes, 1 << 20, 4, ranks_per_node=4)
    transfers = [t for block in plan.blocks for b in block.buckets for t in plan.transfers(b)]
    assert all(t.sender // 4 == t.receiver // 4 for t in transfers)
    sent = [sum(t.sender == rank for t in transfers) for rank in holders]
    assert sent == [6, 6, 12, 12]


def test_a_weight_larger_than_a_bucket_keeps_all_its_holders_busy():
    shapes = {"w": (64, 4)}
    source = {rank: fsdp_slices(shapes, 4, rank) for rank in range(4)}
    target = {rank: whole_slices(shapes) for rank in range(4)}
    plan = plan_resharding(source, target, shapes, 512, 4)
    assert len(plan.blocks[0].buckets) > 2
    assert all({piece.contributor for piece in bucket.pieces} == {0, 1, 2, 3} for bucket in plan.blocks[0].buckets)


def test_one_wide_weight_leaves_the_others_their_size():
    shapes = {"w": (8,), "bias": (4,)}
    source = {rank: fsdp_slices(shapes, 2, rank) for rank in range(2)}
    target = {rank: whole_slices(shapes) for rank in range(2)}
    plan = plan_resharding(source, target, shapes, 1 << 20, {"w": 2, "bias": 4})
    assert least_bytes(plan) == {0: 4 * 2 + 2 * 4, 1: 4 * 2 + 2 * 4}


def test_a_gap_in_the_source_is_named():
    with pytest.raises(ValueError, match=r"ranks \[0\] want .*'w'.* no rank holds it"):
        plan_resharding({0: [WeightSlice("w", (0,), (3,))]}, {0: whole_slices({"w": (4,)})}, {"w": (4,)}, 64, 4)


def test_a_bucket_too_small_for_one_element_is_refused_with_the_least_size():
    shapes = {"w": (4,)}
    source = {rank: fsdp_slices(shapes, 2, rank) for rank in range(2)}
    with pytest.raises(ValueError, match="bucket_bytes is 7.*at least 8"):
        plan_resharding(source, {rank: whole_slices(shapes) for rank in range(2)}, shapes, 7, 4)
