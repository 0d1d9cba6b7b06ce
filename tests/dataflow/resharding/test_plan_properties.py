"""What holds for the plan between any update layout and any generation layout."""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from spmdrl.dataflow.resharding.planning.plan import ReshardPlan, plan_resharding
from spmdrl.dataflow.resharding.planning.slice_layouts import generation_slices, update_slices
from spmdrl.nouns.batch import WeightSlice
from tests.bench.resharding.plan_bytes import least_bytes
from tests.dataflow.resharding.tables import MODELS, deep_table, generation_layouts, update_layouts

ELEMENT_BYTES = 2
# A few hundred elements over 16 ranks: each plan has several buckets, and large weights are cut.
BUCKET_BYTES = 2048
SAMPLED_PAIRS = 4

table_of = functools.cache(deep_table)
SlicesByRank = dict[int, list[WeightSlice]]


@dataclass(frozen=True)
class Side:
    """What ranks hold, or what they want: slices, and the same as marks on a row of all elements a rank."""

    slices: SlicesByRank
    marks: np.ndarray


class Elements:
    """Numbers the elements of all weights of a table."""

    def __init__(self, model: str):
        self.shapes = table_of(model).shapes
        bounds = list(itertools.accumulate(map(math.prod, self.shapes.values()), initial=0))
        self.num_elements = bounds[-1]
        self._spans = dict(zip(self.shapes, map(slice, bounds[:-1], bounds[1:]), strict=True))

    def of(self, row: np.ndarray, box: WeightSlice) -> np.ndarray:
        """The box's elements within a rank's row, as a view."""
        whole = row[self._spans[box.name]].reshape(self.shapes[box.name])
        return whole[tuple(map(slice, box.starts, box.stops))]

    def side(self, slices: SlicesByRank) -> Side:
        marks = np.zeros((len(slices), self.num_elements), dtype=np.int8)
        for rank, boxes in slices.items():
            for box in boxes:
                self.of(marks[rank], box)[...] += 1
        return Side(slices, marks)


elements_of = functools.cache(Elements)


@functools.cache
def sides(model: str, num_ranks: int) -> tuple[list[Side], list[Side]]:
    """What ranks hold under all update layouts and want under all generation layouts; layouts that agree count once."""
    table = table_of(model)
    ranks = range(num_ranks)
    held = [[update_slices(table, layout, rank) for rank in ranks] for layout in update_layouts(model, num_ranks)]
    wanted = [
        [generation_slices(table, degrees, rank) for rank in ranks] for degrees in generation_layouts(model, num_ranks)
    ]
    return _distinct(model, held), _distinct(model, wanted)


def _distinct(model: str, layouts: Sequence[list[list[WeightSlice]]]) -> list[Side]:
    distinct = {tuple(map(tuple, by_rank)): by_rank for by_rank in layouts}
    return [elements_of(model).side(dict(enumerate(by_rank))) for by_rank in distinct.values()]


def check_pair(model: str, held: Side, wanted: Side) -> None:
    plan = plan_resharding(held.slices, wanted.slices, elements_of(model).shapes, BUCKET_BYTES, ELEMENT_BYTES)
    assert_received_once(elements_of(model), plan, held, wanted)
    lacking = ELEMENT_BYTES * (wanted.marks & ~held.marks & 1).sum(axis=1)
    assert least_bytes(plan) == dict(enumerate(lacking.tolist()))
    assert_buckets_fit(plan)


def assert_received_once(elements: Elements, plan: ReshardPlan, held: Side, wanted: Side) -> None:
    """Each wanted element is copied where it is held, and is otherwise received from a rank that holds it, once."""
    got = np.zeros_like(wanted.marks)
    for block in plan.blocks:
        for piece in itertools.chain.from_iterable(bucket.pieces for bucket in block.buckets):
            for rank in set(piece.wanters).intersection(piece.holders):
                assert elements.of(held.marks[rank], piece.box).all()
                elements.of(got[rank], piece.box)[...] += 1
            for transfer in piece.transfers(plan.ranks_per_node):
                assert transfer.sender in block.ranks and transfer.receiver in block.ranks
                assert elements.of(held.marks[transfer.sender], transfer.box).all()
                assert not elements.of(held.marks[transfer.receiver], transfer.box).any()
                elements.of(got[transfer.receiver], transfer.box)[...] += 1
    assert np.array_equal(got, wanted.marks)


def assert_buckets_fit(plan: ReshardPlan) -> None:
    """What a rank sends and receives at once, and the segments of an all-gather, stay within the bucket's bytes."""
    for block in plan.blocks:
        for bucket in block.buckets:
            moved = dict.fromkeys(block.ranks, 0)
            segments = dict.fromkeys(block.ranks, 0)
            for transfer in plan.transfers(bucket):
                moved[transfer.sender] += ELEMENT_BYTES * transfer.box.num_elements
                moved[transfer.receiver] += ELEMENT_BYTES * transfer.box.num_elements
            for piece in bucket.pieces:
                segments[piece.contributor] += ELEMENT_BYTES * piece.box.num_elements * piece.is_missing
            assert max(*moved.values(), len(segments) * max(segments.values())) <= bucket.num_bytes <= BUCKET_BYTES


def check_all_pairs(model: str, num_ranks: int) -> None:
    for held, wanted in itertools.product(*sides(model, num_ranks)):
        check_pair(model, held, wanted)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", range(1, 5))
def test_every_wanted_element_is_received_once_between_all_layouts_of_up_to_4_ranks(model, num_ranks):
    check_all_pairs(model, num_ranks)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", range(5, 1 + int(os.environ.get("SPMDRL_MOST_RANKS", "5"))))
def test_every_wanted_element_is_received_once_between_all_layouts_of_more_ranks(model, num_ranks):
    """Up to SPMDRL_MOST_RANKS ranks; 16 take a quarter of an hour."""
    check_all_pairs(model, num_ranks)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [6, 8, 12, 16])
def test_every_wanted_element_is_received_once_between_some_layouts_of_many_ranks(model, num_ranks):
    pairs = list(itertools.product(*sides(model, num_ranks)))
    for held, wanted in random.Random(num_ranks).sample(pairs, SAMPLED_PAIRS):
        check_pair(model, held, wanted)


@pytest.mark.parametrize("model", MODELS)
def test_update_ranks_hold_every_element_and_each_rank_holds_none_twice(model):
    for num_ranks in (4, 6):
        for side in sides(model, num_ranks)[0]:
            assert side.marks.max() == 1 and side.marks.any(axis=0).all()
