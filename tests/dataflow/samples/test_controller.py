from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.controller import Controller, RowStatus
from spmdrl.dataflow.samples.metadata import RowDrop, RowMetadata, pack_news, unpack_news
from spmdrl.dataflow.samples.schema import columns_mask
from spmdrl.types import WorkerState

NUM_ROWS = 12
NEEDS = frozenset({"response_ids", "reward"})

row_sets = st.sets(st.integers(0, NUM_ROWS - 1))


def news(rows, name: str, home: int = 0) -> RowMetadata:
    index = np.array(sorted(rows), dtype=np.int64)
    lengths = {name: index + 1} if name == "response_ids" else {}
    return RowMetadata(index, np.full_like(index, home), columns_mask([name]), lengths)


def make_controller(group_size: int = 1) -> Controller:
    return Controller(WorkerState.ADVANTAGE, NEEDS, num_rows=NUM_ROWS, group_size=group_size)


@given(row_sets, row_sets)
def test_a_row_is_ready_when_all_its_columns_are_there(responses, rewards):
    controller = make_controller()
    controller.observe(news(responses, "response_ids"))
    controller.observe(news(rewards, "reward"))
    assert controller.ready_rows().tolist() == sorted(responses & rewards)


@given(st.lists(st.tuples(st.sampled_from(["response_ids", "reward"]), row_sets), max_size=8), st.randoms())
def test_the_order_of_news_makes_no_difference(entries, random):
    seen: set[tuple[str, int]] = set()
    fresh = []
    for name, rows in entries:
        fresh.append(news({row for row in rows if (name, row) not in seen}, name))
        seen |= {(name, row) for row in rows}
    one, other = make_controller(), make_controller()
    for entry in fresh:
        one.observe(entry)
    random.shuffle(fresh)
    for entry in fresh:
        other.observe(entry)
    assert one.ready_rows().tolist() == other.ready_rows().tolist()
    assert one.lengths("response_ids").tolist() == other.lengths("response_ids").tolist()
    assert one.homes.tolist() == other.homes.tolist()


@given(st.lists(st.tuples(row_sets, st.integers(0, NUM_ROWS)), max_size=8))
def test_no_row_is_claimed_twice(rounds):
    controller, claimed, announced = make_controller(), [], set()
    for rows, count in rounds:
        rows = rows - announced
        announced |= rows
        controller.observe(news(rows, "response_ids"))
        controller.observe(news(rows, "reward"))
        batch = controller.ready_rows()[:count]
        controller.claim(batch)
        claimed += batch.tolist()
    assert len(claimed) == len(set(claimed))
    assert set(claimed) <= announced


def test_a_claim_of_a_row_that_is_not_ready_says_what_it_waits_for_and_claims_nothing():
    controller = make_controller()
    controller.observe(news(range(NUM_ROWS), "response_ids"))
    controller.observe(news({0}, "reward"))
    with pytest.raises(ValueError, match="row 1: it waits for columns reward before advantage"):
        controller.claim([0, 1])
    controller.claim([0])
    with pytest.raises(ValueError, match="row 0: it is claimed for advantage"):
        controller.claim([0])


def test_only_claimed_rows_are_consumed():
    controller = make_controller()
    controller.observe(news({3}, "response_ids"))
    controller.observe(news({3}, "reward"))
    with pytest.raises(ValueError, match="waiting, not claimed"):
        controller.consume([3])
    controller.claim([3])
    controller.consume([3])
    assert controller.rows_with(RowStatus.CONSUMED).tolist() == [3]
    assert controller.ready_rows().size == 0


@given(row_sets, row_sets)
def test_groups_come_whole_and_do_not_wait_for_dropped_rows(rows, dropped):
    controller = make_controller(group_size=4)
    controller.observe(news(rows, "response_ids"))
    controller.observe(news(rows, "reward"))
    controller.drop(sorted(dropped))
    ready = set(controller.ready_rows(by_group=True).tolist())
    for start in range(0, NUM_ROWS, 4):
        group = set(range(start, start + 4))
        whole = group <= rows | dropped
        assert ready & group == (group & rows - dropped if whole else set())


def test_contradicting_news_are_refused():
    controller = make_controller()
    controller.observe(news({1, 2}, "reward"))
    with pytest.raises(ValueError, match="of row 2 are announced twice"):
        controller.observe(news({2, 5}, "reward"))
    with pytest.raises(ValueError, match="row 1 moves from warehouse 0"):
        controller.observe(news({1}, "response_ids", home=1))
    with pytest.raises(ValueError, match="outside of the batch"):
        controller.observe(news({NUM_ROWS}, "reward"))


@given(st.lists(st.tuples(st.sampled_from(["response_ids", "reward", "drop"]), row_sets), max_size=5))
def test_news_survive_packing(entries):
    sent = [
        RowDrop(np.array(sorted(rows), dtype=np.int64), "zu lang \N{SNOWMAN}") if name == "drop" else news(rows, name)
        for name, rows in entries
    ]
    received = unpack_news(pack_news(sent))
    assert [type(entry) for entry in received] == [type(entry) for entry in sent]
    for before, after in zip(sent, received, strict=True):
        assert before.pack().tolist() == after.pack().tolist()
        if isinstance(before, RowDrop):
            assert before.reason == after.reason
