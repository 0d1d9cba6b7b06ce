from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.catalogue import joined, metadata_of
from spmdrl.dataflow.samples.schema import RULES
from spmdrl.dataflow.samples.store.shared_memory import Pool, host_pool
from spmdrl.dataflow.samples.store.warehouse import Warehouse
from spmdrl.dataflow.samples.volume import Link, Volume
from spmdrl.nouns.batch import Batch


@contextmanager
def opened(kind: str) -> Iterator[Warehouse]:
    """A warehouse in private memory, or in memory that a node's ranks share."""
    if kind == "private":
        yield Warehouse()
        return
    with shared_by(1) as (warehouse,):
        yield warehouse


@contextmanager
def shared_by(num_ranks: int) -> Iterator[list[Warehouse]]:
    """One node's warehouse as each of its ranks sees it."""
    host = host_pool(num_ranks, 1 << 24)
    warehouses = [Warehouse(Pool(host.address, rank)) for rank in range(num_ranks)]
    host.forget_names()
    try:
        yield warehouses
    finally:
        for warehouse in warehouses:
            warehouse.close()


@pytest.fixture(params=["private", "shared"])
def warehouse(request):
    with opened(request.param) as found:
        yield found


def make_batch(rows) -> Batch:
    """Rows whose values follow from the row number; row r has r % 4 response tokens."""
    rows = list(rows)
    batch = Batch.of_rows(rows)
    batch.put_lists("response_ids", [[100 * row + token for token in range(row % 4)] for row in rows], torch.int32)
    batch.put_dense("reward", torch.tensor([row / 2 for row in rows], dtype=torch.float32))
    return batch


def my_lengths(name: str) -> np.ndarray:
    """Row lengths of the rows of `make_batch`, as a catalogue has them."""
    assert name == "response_ids"
    return np.arange(1000) % 4


def same(one: Batch, other: Batch) -> bool:
    return (
        one.rows.tolist() == other.rows.tolist()
        and one.names == other.names
        and one.to_lists("response_ids") == other.to_lists("response_ids")
        and one.dense("reward").tolist() == other.dense("reward").tolist()
    )


@pytest.mark.parametrize("kind", ["private", "shared"])
@given(data=st.data())
def test_rows_put_in_any_chunks_come_back_in_the_asked_order(kind, data):
    rows = data.draw(st.permutations(range(12)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 11))))
    asked = data.draw(st.lists(st.sampled_from(range(12)), unique=True))
    with opened(kind) as warehouse:
        for start, stop in zip([0, *cuts], [*cuts, 12], strict=True):
            warehouse.put(make_batch(rows[start:stop]))
        volume = Volume()
        assert same(warehouse.get(asked, ["reward", "response_ids"], volume), make_batch(asked))
        assert volume.payload_bytes(Link.PROCESS) == (make_batch(asked).num_bytes() - 8 if asked else 0)


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), st.data())
def test_selected_and_joined_rows_keep_their_values(rows, data):
    positions = data.draw(st.permutations(range(len(rows))))
    whole = make_batch(rows)
    assert same(whole.select(positions), make_batch([rows[position] for position in positions]))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [whole.select(range(0, cut)), whole.select(range(cut, len(rows)))]
    assert same(Batch.concatenate(parts), whole)


def test_a_missing_column_is_named_with_its_row(warehouse):
    warehouse.put(make_batch([1, 2]))
    with pytest.raises(KeyError, match=r"row 3 \(and 1 more rows\) has no column 'reward'"):
        warehouse.get([1, 3, 40], ["reward"])
    with pytest.raises(KeyError, match="row 1 has no column 'advantages'"):
        warehouse.get([1], ["advantages"])


def test_a_cleared_warehouse_holds_nothing_and_takes_the_same_rows_again(warehouse):
    warehouse.put(make_batch([0, 1, 2]))
    assert warehouse.num_bytes == make_batch([0, 1, 2]).num_bytes()
    warehouse.clear()
    assert warehouse.num_bytes == 0
    with pytest.raises(KeyError):
        warehouse.get([1], ["reward"])
    warehouse.put(make_batch([2, 1]))
    assert same(warehouse.get([1, 2], ["response_ids", "reward"]), make_batch([1, 2]))


def test_a_column_is_stored_once(warehouse):
    warehouse.put(make_batch([0, 1]))
    newer = Batch.of_rows([2, 1])
    newer.put_dense("reward", torch.tensor([8.0, 9.0]))
    with pytest.raises(ValueError, match="row 1 has column 'reward' already"):
        warehouse.put(newer)


def test_several_rows_may_share_one_stored_value(warehouse):
    prompts = Batch.of_rows([0, 1])
    prompts.put_lists("prompt_ids", [[1, 2], [3]], torch.int32)
    warehouse.keep(prompts, positions=[0, 0, 1, 1], rows=[4, 5, 6, 7])
    assert warehouse.num_bytes == prompts.num_bytes()
    assert warehouse.get([7, 4, 5], ["prompt_ids"]).to_lists("prompt_ids") == [[3], [1, 2], [1, 2]]


def test_a_column_may_be_stored_with_others_in_some_rows_and_alone_in_other_rows(warehouse):
    warehouse.put(make_batch([0, 1]))
    alone = Batch.of_rows([3, 2])
    alone.put_dense("reward", torch.tensor([1.5, 1.0]))
    warehouse.put(alone)
    for asked in ([0, 1, 2, 3], [3, 0, 2, 1], [3, 2]):
        assert warehouse.get(asked, ["reward"]).dense("reward").tolist() == [row / 2 for row in asked]
    with pytest.raises(KeyError, match="row 2 has no column 'response_ids'"):
        warehouse.get([1, 2], ["reward", "response_ids"])


@given(st.lists(st.integers(0, 5), max_size=20).map(lambda ids: [0, *ids]), st.booleans())
def test_rows_come_back_with_the_values_that_they_share_in_any_order(prompt_of_row, in_order):
    prompts = Batch.of_rows(range(6))
    lists = [list(range(prompt)) for prompt in range(6)]
    prompts.put_lists("prompt_ids", lists, torch.int32)
    prompts.put_dense("finished", torch.arange(6, dtype=torch.int32))
    prompt_of_row = sorted(prompt_of_row) if in_order else prompt_of_row
    warehouse, volume = Warehouse(), Volume()
    warehouse.keep(prompts, range(len(prompt_of_row)), prompt_of_row)
    got = warehouse.get(range(len(prompt_of_row)), ["prompt_ids", "finished"], volume)
    assert got.to_lists("prompt_ids") == [lists[prompt] for prompt in prompt_of_row]
    assert got.dense("finished").tolist() == prompt_of_row
    assert volume.payload_bytes(Link.PROCESS) == got.num_bytes() - 8


def test_rows_that_lie_apart_come_back_whole_when_they_take_megabytes(warehouse):
    rows = Batch.of_rows([0, 1, 2])
    rows.put_ragged("response_ids", torch.arange(1_500_000, dtype=torch.int32), torch.tensor([0, 10, 10, 1_500_000]))
    warehouse.put(rows)
    got = warehouse.get([2, 1, 0], ["response_ids"])
    assert got.offsets("response_ids").tolist() == [0, 1_499_990, 1_499_990, 1_500_000]
    assert torch.equal(got.values("response_ids"), torch.arange(1_500_000, dtype=torch.int32).roll(-10))


def test_any_number_of_columns_may_be_put_one_by_one_in_portions_of_growing_row_numbers(warehouse):
    columns = [rule.column for rule in RULES if not rule.column.ragged or rule.length_of is None]
    assert len(columns) > 8
    for rows in ([3, 4], [40, 41], [0, 1]):
        for number, column in enumerate(columns):
            batch, values = Batch.of_rows(rows), torch.tensor([row + 100 * number for row in rows], dtype=column.dtype)
            if column.ragged:
                batch.put_ragged(column.name, values, torch.arange(3))
            else:
                batch.put_dense(column.name, values)
            warehouse.put(batch)
            with pytest.raises(ValueError, match=f"row {rows[0]} has column '{column.name}' already"):
                warehouse.put(batch)
    got = warehouse.get([41, 3, 4, 0, 1, 40], [column.name for column in columns])
    for number, column in enumerate(columns):
        assert (got.columns[column.name] - 100 * number).tolist() == [41, 3, 4, 0, 1, 40]


def test_no_rows_come_back_with_their_columns(warehouse):
    empty = warehouse.get([], ["response_ids", "reward"])
    assert len(empty) == 0 and empty.names == ["response_ids", "reward"]


def test_threads_put_and_get_at_once(warehouse):
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for row in range(first, first + 40):
                warehouse.put(make_batch([row]))
                assert same(warehouse.get([row], ["response_ids", "reward"]), make_batch([row]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    kept = [100 * number + row for number in range(4) for row in range(40)]
    assert same(warehouse.get(kept, ["response_ids", "reward"]), make_batch(kept))


def test_a_ranks_rows_are_read_in_place_by_its_neighbour():
    with shared_by(2) as (first, second):
        theirs = make_batch(range(8))
        second.add_stored(metadata_of(theirs, first.put(theirs)), np.ones(12, dtype=bool), my_lengths)
        second.put(make_batch(range(8, 12)))
        whole = second.get(range(8), ["reward", "response_ids"])
        assert same(whole, make_batch(range(8)))
        again = second.get(range(8), ["response_ids"])
        assert again.values("response_ids").data_ptr() == whole.values("response_ids").data_ptr(), "no copy was made"
        part = second.get(range(2, 5), ["reward", "response_ids"])
        assert same(part, make_batch(range(2, 5)))
        # Rows 0 and 1 have one token of 4 bytes.
        assert part.values("response_ids").data_ptr() == whole.values("response_ids").data_ptr() + 4
        volume = Volume()
        mixed = second.get([9, 3, 8, 0], ["reward", "response_ids"], volume)
        assert same(mixed, make_batch([9, 3, 8, 0]))
        assert volume.get_bytes[Link.NODE]["reward"] == volume.get_bytes[Link.PROCESS]["reward"] == 8
        # Rows 3 and 0 have 3 tokens of 4 bytes, rows 9 and 8 have 1; each row has an offset of 8 bytes.
        assert volume.get_bytes[Link.NODE]["response_ids"] == 28
        assert volume.get_bytes[Link.PROCESS]["response_ids"] == 20
        del whole, again, part


def test_stored_rows_are_indexed_once_and_only_those_of_rows_that_live_here():
    with shared_by(2) as (first, second):
        batches = [make_batch([0, 1]), make_batch([2, 3]), make_batch([4])]
        news = joined(metadata_of(batch, first.put(batch)) for batch in batches)
        is_here = np.array([True, True, False, False, True])
        for entry in news:
            second.add_stored(entry, is_here, my_lengths)
            # The rank that stored the rows has indexed them already.
            first.add_stored(entry, is_here, my_lengths)
        assert same(second.get([4, 0, 1], ["response_ids", "reward"]), make_batch([4, 0, 1]))
        with pytest.raises(KeyError, match="row 2 has no column"):
            second.get([2], ["reward"])


def test_memory_of_earlier_batches_is_used_again_and_the_next_batch_starts_empty():
    with shared_by(2) as (first, second):
        places = []

        def big_lengths(_: str) -> np.ndarray:
            return np.full(4, 100_000)

        for _ in range(40):
            big = Batch.of_rows(range(4))
            big.put_lists("response_ids", [[row] * 100_000 for row in range(4)], torch.int32)
            places.append(first.put(big))
            second.add_stored(metadata_of(big, places[-1]), np.ones(4, dtype=bool), big_lengths)
            assert second.get([3], ["response_ids"]).values("response_ids")[-1] == 3
            for warehouse in (first, second):
                warehouse.clear()
            with pytest.raises(KeyError):
                second.get([3], ["response_ids"])
        assert first.num_bytes == second.num_bytes == 0 and len(set(places)) == 1


@given(st.data())
def test_any_rows_of_many_puts_of_a_neighbour_come_back_in_the_asked_order(data):
    """The places of all puts are worked out at once, from lengths alone."""
    rows = data.draw(st.permutations(range(12)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 11))))
    asked = data.draw(st.lists(st.sampled_from(range(12)), unique=True, min_size=1))
    with shared_by(2) as (first, second):
        parts = [make_batch(rows[start:stop]) for start, stop in zip([0, *cuts], [*cuts, 12], strict=True)]
        news = joined(metadata_of(part, first.put(part)) for part in parts)
        later = [scored(part) for part in reversed(parts)]
        news += joined(metadata_of(part, first.put(part)) for part in later)
        for entry in news:
            second.add_stored(entry, np.ones(12, dtype=bool), my_lengths)
        for reader, link in ((first, Link.PROCESS), (second, Link.NODE)):
            volume = Volume()
            batch = reader.get(asked, ["old_logprobs", "reward", "response_ids"], volume)
            assert batch.to_lists("old_logprobs") == scored(make_batch(asked)).to_lists("old_logprobs")
            assert batch.to_lists("response_ids") == make_batch(asked).to_lists("response_ids")
            assert batch.dense("reward").tolist() == [row / 2 for row in asked]
            # A row's offset has 8 bytes in each ragged column.
            assert volume.payload_bytes(link) == batch.num_bytes() - 16
        assert first.num_bytes == second.num_bytes == sum(part.num_bytes() for part in [*parts, *later])


def scored(rows: Batch) -> Batch:
    """Another state's column of the same rows."""
    out = Batch(rows.rows)
    out.put_ragged("old_logprobs", rows.values("response_ids") / 8, rows.offsets("response_ids"))
    return out


def test_places_that_cannot_hold_the_announced_rows_are_refused():
    with shared_by(2) as (first, second):
        batch = make_batch(range(4))
        place, everywhere = first.put(batch), np.ones(4, dtype=bool)
        with pytest.raises(ValueError, match="of rows .* bytes, but their place"):
            wrong = place._replace(num_bytes=place.num_bytes + 64)
            second.add_stored(metadata_of(batch, wrong), everywhere, my_lengths)
        for wrong in (place._replace(start=-64), place._replace(start=32), place._replace(start=1 << 40)):
            with pytest.raises(ValueError, match="lies outside of the pool"):
                second.add_stored(metadata_of(batch, wrong), everywhere, my_lengths)
        with pytest.raises(KeyError, match="row 0"):
            second.get([0], ["reward"])


def test_rows_below_0_are_refused(warehouse):
    warehouse.put(make_batch([0, 1, 2]))
    with pytest.raises(KeyError, match="row -1"):
        warehouse.get([-1, 0], ["reward"])
