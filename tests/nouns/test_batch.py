"""All that a batch holds is there as one TensorDict: whatever handles TensorDicts handles batches."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from spmdrl.nouns.batch import Batch
from spmdrl.resources.device import to_host


def some_batch() -> Batch:
    batch = Batch.of_rows([7, 3, 5])
    batch.put_lists("tokens", [[1, 2, 3], [], [4]], torch.int32)
    batch.put_dense("rewards", torch.tensor([0.5, 1.0, -2.0]))
    return batch


def assert_same(batch: Batch, other: Batch) -> None:
    assert batch.rows.tolist() == other.rows.tolist() and batch.names == other.names
    assert batch.to_lists("tokens") == other.to_lists("tokens")
    assert torch.equal(batch.dense("rewards"), other.dense("rewards"))


def test_a_batch_and_its_tensordict_hold_the_same_tensors():
    batch = some_batch()
    data, again = batch.data, Batch.over(batch.data)
    assert_same(again, batch)
    assert data["tokens"] is again.values("tokens") is batch.values("tokens")
    assert data["offsets", "tokens"] is again.offsets("tokens") is batch.offsets("tokens")
    assert data["rows"] is again.rows is batch.rows


def test_what_a_tensordict_can_do_a_batch_survives(tmp_path):
    batch = some_batch()
    batch.data.memmap(tmp_path / "batch")
    for data in (
        batch.data.clone(),
        batch.data.detach().to("cpu"),
        batch.data.consolidate(),
        TensorDict(batch.data.to_dict(), batch_size=[]),
        TensorDict.load_memmap(tmp_path / "batch"),
    ):
        assert_same(Batch.over(data), batch)


def test_a_tensordict_of_other_content_is_no_batch():
    with pytest.raises(ValueError, match=r"has no \['offsets'\].*\['rewards', 'rows'\]"):
        Batch.over(TensorDict({"rows": torch.arange(2), "rewards": torch.ones(2)}, batch_size=[]))


def test_a_dense_column_takes_the_place_of_a_ragged_one_and_back():
    batch = some_batch()
    batch.put_dense("tokens", torch.tensor([1, 2, 3]))
    assert not batch.is_ragged("tokens") and batch.num_bytes() == 3 * 8 + 3 * 4
    batch.put_lists("tokens", [[9], [8], [7]], torch.int32)
    assert batch.to_lists("tokens") == [[9], [8], [7]]


def test_columns_of_the_same_rows_are_joined():
    batch, other = some_batch(), Batch.of_rows([7, 3, 5])
    other.put_lists("values", [[0.5], [], [1.5, 2.5]], torch.float32)
    batch.update(other)
    assert batch.names == ["rewards", "tokens", "values"]
    assert batch.to_lists("values") == [[0.5], [], [1.5, 2.5]] and batch.to_lists("tokens") == [[1, 2, 3], [], [4]]


def test_gradients_stay_behind_when_a_batch_goes_to_the_host():
    batch = some_batch()
    assert batch.on_host(to_host) is batch
    batch.put_dense("loss", torch.ones(3, requires_grad=True))
    host = batch.on_host(to_host)
    assert not host.dense("loss").requires_grad and host.dense("rewards") is batch.dense("rewards")


def test_columns_that_share_offsets_share_them_on_the_host_too():
    batch, asked = Batch.of_rows([0, 1]), []
    values, offsets = torch.ones(3, requires_grad=True), torch.tensor([0.0, 1, 3], requires_grad=True)
    for name in ("old_logprobs", "ref_logprobs"):
        batch.put_ragged(name, values, offsets)

    def copied(tensors):
        asked.append(len(tensors))
        return [tensor.clone() for tensor in tensors]

    host = batch.on_host(copied)
    assert asked == [2] and host.offsets("old_logprobs") is host.offsets("ref_logprobs")


def test_a_ragged_column_takes_the_place_of_a_dense_one_in_an_update_and_back():
    batch, other = some_batch(), Batch.of_rows([7, 3, 5])
    other.put_dense("tokens", torch.tensor([1, 2, 3]))
    other.put_lists("rewards", [[1.0], [], [2.0]], torch.float32)
    batch.update(other)
    assert batch.is_ragged("rewards") and not batch.is_ragged("tokens")
