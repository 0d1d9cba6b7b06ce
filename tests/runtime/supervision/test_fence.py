"""The newest job in a folder has the highest token, and an earlier one is refused from then on."""

from __future__ import annotations

import json

import pytest

from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.engines.training.checkpoints.manifest import read_manifest
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.observability.jsonl import JsonlWriter
from spmdrl.runtime.supervision.fence import (
    FENCE_FILE,
    FolderTaken,
    arm_fence,
    check_fence,
    disarm_fence,
    take_folder,
)
from spmdrl.runtime.supervision.holder import LOCK_FILE, held


@pytest.fixture
def folder(tmp_path):
    arm_fence(tmp_path, take_folder(tmp_path))
    yield tmp_path
    disarm_fence()


def write(folder):
    (folder / "weights").write_bytes(b"w" * 100)
    return [folder / "weights"]


def test_numbers_rise_and_only_the_newest_passes(folder):
    check_fence()
    other = json.loads(take_folder(folder))
    assert other["number"] == 2 and not list(folder.glob(".*"))
    with pytest.raises(FolderTaken, match=rf"was taken by process {other['pid']} on .* token 1 no longer counts"):
        check_fence()


@pytest.mark.parametrize("content", [None, b"{", b"[1]", b'{"number": "2"}'])
def test_a_token_that_is_gone_or_broken_is_another_ones(folder, content):
    (folder / FENCE_FILE).unlink() if content is None else (folder / FENCE_FILE).write_bytes(content)
    with pytest.raises(FolderTaken):
        check_fence()
    arm_fence(folder, take_folder(folder))
    check_fence()


def test_what_two_jobs_without_locks_take_at_once_is_different(tmp_path):
    first = take_folder(tmp_path)
    (tmp_path / FENCE_FILE).unlink()
    arm_fence(tmp_path, first)
    second = take_folder(tmp_path)
    assert json.loads(first)["number"] == json.loads(second)["number"]
    with pytest.raises(FolderTaken):
        check_fence()
    disarm_fence()


def test_a_job_that_lost_its_lock_while_it_started_takes_nothing(tmp_path):
    with held(tmp_path):
        record = json.loads((tmp_path / LOCK_FILE).read_text())
        (tmp_path / LOCK_FILE).write_text(json.dumps(record | {"host": "another"}))
        with pytest.raises(FolderTaken, match=LOCK_FILE):
            take_folder(tmp_path)
    # Nor does it release what is another's.
    assert (tmp_path / LOCK_FILE).exists() and not (tmp_path / FENCE_FILE).exists()


def test_lines_after_the_folder_was_taken_are_in_no_file(folder):
    stale = JsonlWriter(folder / "metrics.jsonl")
    stale.write({"step": 1})
    arm_fence(folder, take_folder(folder))
    newer = JsonlWriter(folder / "metrics.jsonl")
    newer.truncate_after(1)
    stale.write({"step": 2, "stale": True})
    newer.write({"step": 2})
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1}, {"step": 2}]  # fmt: skip


def test_a_folder_that_is_taken_in_the_middle_of_a_save_gets_no_checkpoint_and_loses_none(folder):
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig(keep_last=1), is_main=True)
    store.save(1, write)
    store.save(2, write)

    def taken_while_writing(aside):
        take_folder(folder)
        return write(aside)

    with pytest.raises(FolderTaken):
        store.save(3, taken_while_writing)
    with pytest.raises(FolderTaken):
        store.forget_old(2)
    assert store.steps() == [1, 2]


def test_a_step_that_a_newer_job_has_written_is_not_replaced(folder):
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig(), is_main=True)
    store.save(1, write)
    assert read_manifest(store.folder_of(1)).token == 1
    first = (folder / FENCE_FILE).read_bytes()
    arm_fence(folder, take_folder(folder))
    store.save(1, write)
    newest = (folder / FENCE_FILE).read_bytes()
    # As if the job had been stopped right behind its last look at the token.
    arm_fence(folder, first)
    (folder / FENCE_FILE).write_bytes(first)
    with pytest.raises(FolderTaken, match="written by a newer job, with the token 2"):
        store.save(1, write)
    arm_fence(folder, newest)
    assert read_manifest(store.folder_of(1)).token == 2 and store.steps() == [1]
