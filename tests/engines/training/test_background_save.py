"""A checkpoint that threads write is the one that was copied, and is there once every rank has written its files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from spmdrl.engines.training.checkpoints.background_save import BackgroundSave, RankOfSave
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.engines.training.checkpoints.file_writes import HostCopies, NoHostMemory, Snapshot, add_text
from spmdrl.engines.training.checkpoints.manifest import damage
from spmdrl.engines.training.checkpoints.trainer_state import write_shards
from spmdrl.engines.training.sharded_model import Shard
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.device import Device
from spmdrl.runtime.supervision.fence import FolderTaken
from tests.bench.faults.planned_faults import VARIABLE, arm_fault


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    arm_fault({})


def snapshot_of(tensor: torch.Tensor, copies: HostCopies, folder: Path) -> Snapshot:
    snapshot = Snapshot(copies)
    shards = {"weight/a": Shard(snapshot.held(tensor), whole_slice("a", tensor.shape), tuple(tensor.shape))}
    snapshot.add(lambda: [write_shards(folder, 0, shards)])
    add_text(snapshot, folder / "texts" / "a.json", "{}")
    snapshot.complete()
    return snapshot


def test_what_is_written_later_is_what_was_there_when_it_was_copied(tmp_path):
    copies, tensor = HostCopies(Device("cpu"), num_ranks=1), torch.arange(12.0).reshape(3, 4).T
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        snapshot, before = snapshot_of(tensor, copies, folder), tensor.clone()
        tensor.add_(100.0)
        paths = snapshot.write()
        assert [path.relative_to(folder).as_posix() for path in paths] == ["shards_00000.safetensors", "texts/a.json"]
        assert load_file(paths[0])["weight/a"].equal(before)


def test_the_memory_of_copies_is_used_again_and_none_overlap():
    copies, given = HostCopies(Device("cpu"), num_ranks=1), [torch.rand(size) for size in (1, 70, 30 << 20, 5)]
    first = [copies.copy(tensor) for tensor in given]
    assert all(one.equal(other) for one, other in zip(first, given, strict=True))
    num_bytes, places = copies.num_bytes, [one.data_ptr() for one in first]
    copies.reuse()
    again = [copies.copy(tensor + 1) for tensor in given]
    assert [one.data_ptr() for one in again] == places and copies.num_bytes == num_bytes
    assert all(one.equal(other + 1) for one, other in zip(again, given, strict=True))


def test_copies_that_the_host_has_no_memory_for_are_refused_before_they_are_made():
    copies = HostCopies(Device("cpu"), num_ranks=1 << 40)
    with pytest.raises(NoHostMemory, match=r"copies are needed, but the host has \d+ to spare"):
        copies.copy(torch.zeros(4))
    assert copies.num_bytes == 0


class TwoRanks:
    """Two ranks of one job in this process, whose first saves a step together with the second."""

    def __init__(self, root: Path):
        self.stores = [CheckpointStore(root, CheckpointConfig(), is_main=rank == 0) for rank in range(2)]
        board = dist.HashStore()
        self.places = [RankOfSave(rank, 2, board) for rank in range(2)]
        self.after: list[int] = []

    def begin(self, rank: int, write, *, last=lambda: (), step: int = 1, number: int = 0) -> BackgroundSave:
        aside = self.stores[0].root / ".writing_0_step_000001"
        aside.mkdir(parents=True, exist_ok=True)

        def writes() -> list[Path]:
            write()
            path = aside / f"rank_{rank}"
            path.write_text("all of it")
            return [path]

        return BackgroundSave(
            self.stores[rank], self.places[rank], step, aside, number=number,
            write=writes, write_last=last, after=lambda: self.after.append(step),
        )  # fmt: skip


def test_a_checkpoint_is_there_once_the_last_rank_has_written_and_no_sooner(tmp_path):
    ranks, may_write = TwoRanks(tmp_path), threading.Event()
    main, other = ranks.begin(0, lambda: None), ranks.begin(1, may_write.wait)
    main.wait_for_files()
    main.wait(0.1)
    assert main.end is None and ranks.stores[0].steps() == [] and ranks.after == []
    may_write.set()
    other.wait_for_files()
    main.wait()
    assert main.end is not None and main.end.result.folder == ranks.stores[0].folder_of(1) and ranks.after == [1]
    assert damage(main.end.result.folder, ("rank_0", "rank_1")) is None
    # The same step again, as after a save that failed: what the board held of the first one is gone.
    again = [ranks.begin(rank, lambda: None, number=1) for rank in range(2)]
    again[0].wait()
    assert again[0].end is not None and again[0].end.result.folder is not None


def test_what_follows_reads_what_all_ranks_have_written(tmp_path):
    ranks, aside = TwoRanks(tmp_path), tmp_path / ".writing_0_step_000001"

    def join() -> list[Path]:
        (aside / "joined").write_text("".join((aside / f"rank_{rank}").read_text() for rank in range(2)))
        return [aside / "joined"]

    main = [ranks.begin(rank, lambda: None, last=join) for rank in range(2)][0]
    main.wait()
    assert main.end is not None and main.end.result.folder is not None
    assert (main.end.result.folder / "joined").read_text() == 2 * "all of it"
    assert damage(main.end.result.folder, ("joined",)) is None


def test_a_rank_whose_disk_is_full_costs_the_checkpoint_and_leaves_nothing(tmp_path):
    def disk_full() -> None:
        raise OSError(28, "No space left on device")

    ranks = TwoRanks(tmp_path)
    main = [ranks.begin(0, lambda: None, last=lambda: pytest.fail("nothing follows")), ranks.begin(1, disk_full)][0]
    main.wait()
    assert main.end is not None and main.end.result.folder is None and "No space left" in str(main.end.result.error)
    assert list(tmp_path.iterdir()) == [] and ranks.after == []


def test_what_is_no_failure_of_the_disk_is_raised_where_the_rank_looks(tmp_path):
    def taken() -> None:
        raise FolderTaken("by another job")

    ranks = TwoRanks(tmp_path)
    main, other = ranks.begin(0, lambda: None), ranks.begin(1, taken)
    with pytest.raises(FolderTaken):
        other.wait_for_files()
    main.wait()
    assert main.end is not None and main.end.result.folder is None


def test_a_thread_meets_the_faults_of_its_own_step(tmp_path):
    arm_fault({VARIABLE: "checkpoint.fsync:0:1:enospc", "WORLD_SIZE": "2"})
    faultpoint("step", 2)
    ranks = TwoRanks(tmp_path)
    main = [ranks.begin(rank, lambda: None, step=1) for rank in range(2)][0]
    main.wait()
    assert main.end is not None and "on purpose" in str(main.end.result.error)
