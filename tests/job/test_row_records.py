"""Digests of rows: they depend on every bit, are read back by row, and take a bounded place on the disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spmdrl.job.rollouts import row_records
from spmdrl.job.rollouts.row_records import RowPlaces, RowRecords, read_row_records
from spmdrl.nouns.batch import Batch, offsets_of
from spmdrl.resources.device import Device
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import Axis, UpdateMesh
from spmdrl.resources.world import World
from spmdrl.runtime.launch import read_launch_environment

WORLD = World(read_launch_environment({}), Device("cpu"))
ALONE = Axis("lone", 1, 0, None, (0,))
# Sharding isn't looked at.
MESH = UpdateMesh(UpdateLayout(shard=1), 0, ALONE, ALONE, ALONE, ALONE, ALONE, ALONE, None, None)


def records_in(folder, last_step=0) -> RowRecords:
    return RowRecords(folder, WORLD, MESH, last_step=last_step)


def write_step(records: RowRecords, step: int, rewards: list[float]) -> None:
    """Rows 4 and 2, of which the update leaves out row 4."""
    batch = Batch(torch.tensor([4, 2]))
    batch.put_lists("response_ids", [[7, 8, 9], [1]], torch.int32)
    for name in ("rollout_logprobs", "advantages"):
        batch.put_lists(name, [[0.5, -1.0, 0.25], [2.0]], torch.float32)
    records.rewarded(torch.tensor([2, 4]), torch.tensor(rewards))
    records.taken(batch)
    records.trained(torch.tensor([2]), torch.tensor([-0.5]), torch.tensor([0.125]))
    records.write(step)


def test_a_digest_depends_on_every_bit_and_place_of_its_row_alone():
    places = RowPlaces(offsets_of([3, 0, 2]))
    values = torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0])
    before = places.digests(values)
    for place, row in enumerate([0, 0, 0, 2, 2]):
        for bit in range(32):
            other = values.clone()
            other.numpy().view(np.uint32)[place] ^= np.uint32(1 << bit)
            assert (places.digests(other) != before).tolist() == [one == row for one in range(3)], (place, bit)
    assert places.digests(values[[1, 0, 2, 3, 4]])[0] != before[0]


def test_rows_are_read_back_by_step_with_what_the_update_left_out(tmp_path):
    with records_in(tmp_path) as records:
        write_step(records, 1, [0.0, 1.0])
        write_step(records, 2, [0.0, 0.5])
    found = read_row_records(tmp_path, 2)
    assert sorted(found) == [2, 4]
    assert found[4].length == 3 and found[4].trainer is found[4].loss is None
    assert found[2].loss is not None and found[2].ranks == 1
    assert np.frombuffer(bytes.fromhex(found[4].reward), ">f4").item() == 0.5
    assert read_row_records(tmp_path, 1)[4].reward != found[4].reward
    assert read_row_records(tmp_path, 12) == {}


def test_a_resumed_run_drops_the_steps_that_it_does_again_also_of_ranks_that_it_has_no_more(tmp_path):
    with records_in(tmp_path) as records:
        write_step(records, 1, [0.0, 1.0])
        write_step(records, 2, [0.0, 1.0])
    other = tmp_path / "rows/rank_00003.jsonl"
    other.write_bytes((tmp_path / "rows/rank_00000.jsonl").read_bytes())
    with records_in(tmp_path, last_step=1):
        pass
    assert read_row_records(tmp_path, 2) == {}
    assert read_row_records(tmp_path, 1)
    assert '"step": 2' not in other.read_text()


def test_a_long_run_keeps_the_newest_steps_in_two_files(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_records, "_MOST_BYTES", 1000)
    with records_in(tmp_path) as records:
        for step in range(1, 41):
            write_step(records, step, [0.0, 1.0])
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == [
        "rank_00000.jsonl", "rank_00000.older.jsonl"
    ]  # fmt: skip
    assert sum(path.stat().st_size for path in (tmp_path / "rows").iterdir()) < 3000
    assert read_row_records(tmp_path, 40) and read_row_records(tmp_path, 38) and not read_row_records(tmp_path, 1)
