from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.catalogue import Catalogue, RowMetadata
from spmdrl.dataflow.samples.row_lives import Controller, RowStatus
from spmdrl.dataflow.samples.schema import columns_mask
from spmdrl.nouns.batch import WorkerState

NUM_ROWS = 12
NEEDS = frozenset({"response_ids", "reward"})

row_sets = st.sets(st.integers(0, NUM_ROWS - 1))


def news(rows, name: str) -> RowMetadata:
    index = np.array(sorted(rows), dtype=np.int64)
    lengths = {name: index + 1} if name == "response_ids" else {}
    return RowMetadata(index, columns_mask([name]), lengths)


def make_controller(group_size: int = 1) -> tuple[Controller, Catalogue]:
    catalogue = Catalogue(np.zeros(NUM_ROWS, dtype=np.int64), group_size)
    return Controller(WorkerState.ADVANTAGE, NEEDS, catalogue), catalogue


def with_ready_rows(rows, group_size: int = 1) -> tuple[Controller, Catalogue]:
    controller, catalogue = make_controller(group_size)
    for name in sorted(NEEDS):
        catalogue.observe(news(rows, name))
    return controller, catalogue


@given(row_sets, row_sets)
def test_a_row_is_ready_when_all_its_columns_are_there(responses, rewards):
    controller, catalogue = make_controller()
    catalogue.observe(news(responses, "response_ids"))
    assert controller.ready_rows().size == 0
    catalogue.observe(news(rewards, "reward"))
    assert controller.ready_rows().tolist() == sorted(responses & rewards)


@given(st.lists(st.tuples(row_sets, st.integers(0, NUM_ROWS)), max_size=8))
def test_no_row_is_claimed_twice(rounds):
    (controller, catalogue), claimed, announced = make_controller(), [], set()
    for rows, count in rounds:
        rows = rows - announced
        announced |= rows
        catalogue.observe(news(rows, "response_ids"))
        catalogue.observe(news(rows, "reward"))
        batch = controller.ready_rows()[:count]
        controller.claim(batch)
        claimed += batch.tolist()
    assert len(claimed) == len(set(claimed))
    assert set(claimed) <= announced


def test_an_answer_is_kept_until_something_changes():
    controller, catalogue = with_ready_rows({1, 2, 3})
    assert controller.ready_rows() is controller.ready_rows()
    assert controller.ready_rows(by_group=True) is controller.ready_rows(by_group=True)
    catalogue.drop([3], "late")
    assert controller.ready_rows().tolist() == [1, 2]
    controller.claim([1])
    assert controller.ready_rows().tolist() == [2]
    with pytest.raises(ValueError, match="read-only"):
        controller.ready_rows()[0] = 5


def test_a_claim_of_a_row_that_is_not_ready_says_what_it_waits_for_and_claims_nothing():
    controller, catalogue = make_controller()
    catalogue.observe(news(range(NUM_ROWS - 1), "response_ids"))
    catalogue.observe(news({0}, "reward"))
    with pytest.raises(ValueError, match="row 1: it waits for columns reward before advantage"):
        controller.claim([0, 1])
    assert controller.missing_columns(NUM_ROWS - 1) == ["response_ids", "reward"]
    controller.claim([0])
    with pytest.raises(ValueError, match="row 0: it is claimed for advantage"):
        controller.claim([0])
    with pytest.raises(ValueError, match="row 2 is named twice"):
        controller.claim([2, 2])


def test_only_claimed_rows_are_consumed():
    controller, _ = with_ready_rows({3, 4})
    with pytest.raises(ValueError, match="consume row 3: it is waiting, not claimed"):
        controller.consume([3])
    controller.claim([3, 4])
    controller.consume([3])
    with pytest.raises(ValueError, match="consume row 3: it is consumed, not claimed"):
        controller.consume([4, 3])
    assert controller.rows_with(RowStatus.CONSUMED).tolist() == [3]
    assert controller.rows_with(RowStatus.CLAIMED).tolist() == [4]


@pytest.mark.parametrize("drop_first", [True, False])
def test_a_row_that_is_dropped_while_it_is_claimed_may_still_be_consumed(drop_first):
    controller, catalogue = with_ready_rows({3, 4, 5})
    controller.claim([3, 4])
    steps = [lambda: catalogue.drop([3, 4, 5], "late"), lambda: controller.consume([3])]
    for step in steps if drop_first else reversed(steps):
        step()
    assert controller.describe(3) == "is consumed for advantage"
    assert controller.rows_with(RowStatus.CLAIMED).tolist() == [4]
    assert controller.ready_rows().size == 0
    assert controller.rows_with(RowStatus.DROPPED).tolist() == [5]
    assert 3 not in controller.rows_with(RowStatus.WAITING)


@given(row_sets, row_sets, row_sets)
def test_groups_come_whole_and_do_not_wait_for_dropped_rows(rows, dropped, claimed):
    controller, catalogue = with_ready_rows(rows, group_size=4)
    claimed &= rows
    controller.claim(sorted(claimed))
    catalogue.drop(sorted(dropped), "late")
    ready = set(controller.ready_rows(by_group=True).tolist())
    for start in range(0, NUM_ROWS, 4):
        group = set(range(start, start + 4))
        whole = group <= (rows | dropped) - claimed
        assert ready & group == (group & rows - dropped if whole else set())
