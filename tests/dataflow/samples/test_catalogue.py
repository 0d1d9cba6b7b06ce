from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.catalogue import Catalogue, RowDrop, RowMetadata
from spmdrl.dataflow.samples.schema import columns_mask

NUM_ROWS, GROUP_SIZE = 12, 4
row_sets = st.sets(st.integers(0, NUM_ROWS - 1))
COLUMNS = ["response_ids", "reward", "rollout_logprobs"]


def news(rows, name: str) -> RowMetadata:
    index = np.array(sorted(rows), dtype=np.int64)
    lengths = {name: index + 1} if name == "response_ids" else {}
    return RowMetadata(index, columns_mask([name]), lengths)


def catalogue_of(num_rows: int, group_size: int = 1) -> Catalogue:
    return Catalogue(np.zeros(num_rows, dtype=np.int64), group_size)


def facts_of(entries) -> list:
    """Each entry as a fact that contradicts none before it."""
    facts, seen = [], set()
    for name, rows in entries:
        if name in COLUMNS:
            facts.append(news({row for row in rows if (name, row) not in seen}, name))
            seen |= {(name, row) for row in rows}
        else:
            facts.append(RowDrop(np.array(list(rows), dtype=np.int64), name))
    return facts


def known(catalogue: Catalogue) -> tuple:
    dropped = np.flatnonzero(catalogue.is_dropped)
    return (
        catalogue.columns.tolist(),
        catalogue.lengths("rollout_logprobs").tolist(),
        {reason: rows.tolist() for reason, rows in catalogue.rows_by_reason().items() if rows.size},
        catalogue.num_dropped(dropped),
    )


@given(st.lists(st.tuples(st.sampled_from([*COLUMNS, "late", "broken"]), row_sets), max_size=8), st.randoms())
def test_the_order_of_facts_makes_no_difference(entries, random):
    facts = facts_of(entries)
    one, other = catalogue_of(NUM_ROWS), catalogue_of(NUM_ROWS)
    for fact in facts:
        one.observe(fact)
    random.shuffle(facts)
    for fact in facts:
        other.observe(fact)
    assert known(one) == known(other)


@given(st.lists(st.tuples(st.sampled_from(["late", "broken"]), row_sets), max_size=5))
def test_a_dropped_row_has_one_reason(entries):
    catalogue = catalogue_of(NUM_ROWS)
    for fact in facts_of(entries):
        catalogue.observe(fact)
    dropped = set().union(*(rows for _, rows in entries))
    assert set(np.flatnonzero(catalogue.is_dropped).tolist()) == dropped
    broken = set().union(*(rows for reason, rows in entries if reason == "broken"))
    expected = {"broken": len(broken), "late": len(dropped - broken)}
    assert catalogue.num_dropped(np.array(sorted(dropped), dtype=np.int64)) == {k: n for k, n in expected.items() if n}


def test_lengths_are_there_with_their_column():
    catalogue = catalogue_of(3)
    catalogue.observe(news({0, 2}, "response_ids"))
    catalogue.observe(news({2}, "rollout_logprobs"))
    assert catalogue.lengths("response_ids").tolist() == [1, -1, 3]
    assert catalogue.lengths("rollout_logprobs").tolist() == [-1, -1, 3]


def lengths_of(length: int) -> RowMetadata:
    return RowMetadata(np.array([3]), columns_mask(["response_ids"]), {"response_ids": np.array([length])})


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        (news({2, 5}, "reward"), "columns .'reward'. of row 2 are announced twice"),
        (RowMetadata(np.array([7, 8, 7]), columns_mask(["reward"]), {}), "of row 7 are announced twice"),
        (news({NUM_ROWS}, "reward"), "outside of the batch"),
        (news({-1}, "reward"), "outside of the batch"),
        (lengths_of(-1), "row 3 can't have -1 values of 'response_ids'"),
        (RowDrop(np.array([3, 99]), "late"), "outside of the batch"),
    ],
)
def test_facts_that_contradict_are_refused_and_leave_no_trace(fact, message):
    catalogue = catalogue_of(NUM_ROWS, GROUP_SIZE)
    catalogue.observe(news({1, 2}, "reward"))
    before, version = known(catalogue), catalogue.version
    with pytest.raises(ValueError, match=message):
        catalogue.observe(fact)
    assert known(catalogue) == before and catalogue.version == version


def test_rows_named_twice_and_broken_groups_are_refused():
    with pytest.raises(ValueError, match="row 3 is named twice among 3 rows"):
        catalogue_of(NUM_ROWS).checked([3, 1, 3])
    with pytest.raises(ValueError, match="groups of 5"):
        catalogue_of(NUM_ROWS, 5)
