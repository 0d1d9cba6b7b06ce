from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.warehouse import Warehouse
from spmdrl.dataflow.samples.wire import flatten, unflatten
from spmdrl.types import Batch


def make_batch(rows) -> Batch:
    """Rows whose values follow from the row number; row r has r % 4 response tokens."""
    rows = list(rows)
    batch = Batch.of_rows(rows)
    batch.put_lists("response_ids", [[100 * row + token for token in range(row % 4)] for row in rows], torch.int64)
    batch.put_dense("reward", torch.tensor([row / 2 for row in rows], dtype=torch.float32))
    return batch


def same(one: Batch, other: Batch) -> bool:
    return (
        one.rows.tolist() == other.rows.tolist()
        and one.names == other.names
        and one.to_lists("response_ids") == other.to_lists("response_ids")
        and one.dense("reward").tolist() == other.dense("reward").tolist()
    )


@given(st.data())
def test_rows_put_in_any_chunks_come_back_in_the_asked_order(data):
    rows = data.draw(st.permutations(range(12)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 11))))
    warehouse = Warehouse()
    for start, stop in zip([0, *cuts], [*cuts, 12], strict=True):
        warehouse.put(make_batch(rows[start:stop]))
    asked = data.draw(st.lists(st.sampled_from(range(12)), unique=True))
    assert same(warehouse.get(asked, ["reward", "response_ids"]), make_batch(asked))


@given(st.lists(st.integers(0, 1000), unique=True))
def test_a_batch_survives_the_wire(rows):
    assert same(unflatten(flatten(make_batch(rows))), make_batch(rows))


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), st.data())
def test_selected_and_joined_rows_keep_their_values(rows, data):
    positions = data.draw(st.permutations(range(len(rows))))
    whole = make_batch(rows)
    assert same(whole.select(positions), make_batch([rows[position] for position in positions]))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [whole.select(range(0, cut)), whole.select(range(cut, len(rows)))]
    assert same(Batch.concatenate(parts), whole)


def test_a_missing_column_is_named_with_its_row():
    warehouse = Warehouse()
    warehouse.put(make_batch([1, 2]))
    with pytest.raises(KeyError, match=r"row 3 \(and 1 more rows\) has no column 'reward'"):
        warehouse.get([1, 3, 40], ["reward"])
    with pytest.raises(KeyError, match="row 1 has no column 'advantages'"):
        warehouse.get([1], ["advantages"])


def test_memory_goes_with_the_last_row_of_a_chunk():
    warehouse = Warehouse()
    warehouse.put(make_batch([0, 1, 2]))
    held = warehouse.num_bytes
    assert held == make_batch([0, 1, 2]).num_bytes()
    warehouse.drop([0, 1, 99])
    assert warehouse.num_bytes == held
    with pytest.raises(KeyError):
        warehouse.get([1], ["reward"])
    warehouse.drop([2])
    assert warehouse.num_bytes == 0


def test_a_column_put_again_replaces_the_first():
    warehouse = Warehouse()
    warehouse.put(make_batch([0, 1]))
    newer = Batch.of_rows([1])
    newer.put_dense("reward", torch.tensor([9.0]))
    warehouse.put(newer)
    assert warehouse.get([0, 1], ["reward"]).dense("reward").tolist() == [0.0, 9.0]


def test_several_rows_may_share_one_stored_value():
    prompts = Batch.of_rows([0, 1])
    prompts.put_lists("prompt_ids", [[1, 2], [3]], torch.int64)
    warehouse = Warehouse()
    warehouse.put(prompts, positions=[0, 0, 1, 1], rows=[4, 5, 6, 7])
    assert warehouse.num_bytes == prompts.num_bytes()
    assert warehouse.get([7, 4, 5], ["prompt_ids"]).to_lists("prompt_ids") == [[3], [1, 2], [1, 2]]


def test_no_rows_come_back_with_their_columns():
    empty = Warehouse().get([], ["response_ids", "reward"])
    assert len(empty) == 0 and empty.names == ["response_ids", "reward"]


def test_threads_put_and_get_at_once():
    warehouse, errors = Warehouse(), []

    def work(first: int) -> None:
        try:
            for row in range(first, first + 40):
                warehouse.put(make_batch([row]))
                assert same(warehouse.get([row], ["response_ids", "reward"]), make_batch([row]))
                if row % 2:
                    warehouse.drop([row])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    kept = [100 * number + row for number in range(4) for row in range(0, 40, 2)]
    assert same(warehouse.get(kept, ["response_ids", "reward"]), make_batch(kept))


@pytest.mark.parametrize(
    ("position", "tensor", "message"),
    [
        (0, torch.tensor([7, 2, 0]), "same version"),
        (0, torch.tensor([1, 2, 1, 99, 0]), "came with it"),
        (1, torch.tensor([-1, 5]), "numbers >= 0"),
        (3, torch.tensor([0, 9, 1]), "don't cut"),
        (4, torch.zeros(3), "shape"),
        (4, torch.zeros(2, dtype=torch.int64), "schema says"),
    ],
)
def test_garbled_tensors_are_refused(position, tensor, message):
    tensors = flatten(make_batch([2, 3]))
    tensors[position] = tensor
    with pytest.raises(ValueError, match=message):
        unflatten(tensors)
