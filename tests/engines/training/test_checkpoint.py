"""Checkpoint folders are complete or not there."""

from __future__ import annotations

import json

import pytest
from safetensors import SafetensorError

from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.engines.training.checkpoints.manifest import MANIFEST, damage
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig


def store_in(folder, **config):
    return CheckpointStore(folder, CheckpointConfig(**config), is_main=True)


def write(folder):
    paths = [folder / "model" / "weights", folder / "run.json"]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode() * 100)
    return paths


def test_a_saved_checkpoint_is_sound_and_the_oldest_go(tmp_path):
    store = store_in(tmp_path, keep_last=2, keep_every=10)
    for step in (5, 10, 15, 20, 25):
        result = store.save(step, write)
        assert result.folder == store.folder_of(step) and result.num_bytes > 0
        store.forget_old(step)
    assert store.steps() == [10, 20, 25]
    # Those of later steps, which come again, don't count, nor go.
    store.forget_old(20, kept=[10])
    assert store.steps() == [10, 20, 25]
    assert damage(store.folder_of(25)) is None
    assert not list(tmp_path.glob(".writing*"))


def flip_a_bit(folder):
    path = folder / "model" / "weights"
    content = bytearray(path.read_bytes())
    content[7] ^= 16
    path.write_bytes(bytes(content))


def cut_short(folder):
    path = folder / "model" / "weights"
    path.write_bytes(path.read_bytes()[:-1])


def name_a_file_outside(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["../../secret"] = {"bytes": 1, "sha256": "0"}
    # As a list of an earlier version, which has no digest of its own.
    del manifest["sha256_of_files"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (flip_a_bit, "changed"),
        (cut_short, "bytes instead of"),
        (lambda folder: (folder / "run.json").unlink(), "missing"),
        (name_a_file_outside, "outside the folder"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "can't be read"),
    ],
)
def test_damage_is_found_and_the_checkpoint_before_stays_sound(tmp_path, spoil, word):
    store = store_in(tmp_path)
    store.save(1, write)
    store.save(2, write)
    spoil(store.folder_of(2))
    assert word in str(damage(store.folder_of(2)))
    assert damage(store.folder_of(1)) is None


FAILURES = [
    OSError(28, "No space left on device"),
    SafetensorError("I/O error: No space left on device (os error 28)"),
    RuntimeError("write(): No space left on device"),
    MemoryError("No space left for a copy"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failed_save_leaves_the_earlier_one_and_nothing_half_written(tmp_path, failure):
    store = store_in(tmp_path)
    store.save(1, write)

    def disk_full(folder):
        write(folder)
        raise failure

    result = store.save(2, disk_full)
    assert result.folder is None and "No space left" in str(result.error)
    assert store.steps() == [1] and not list(tmp_path.glob(".*"))


def test_a_save_that_can_not_even_begin_is_a_failed_one(tmp_path):
    (tmp_path / "checkpoints").write_text("a file, where a folder should be")
    result = store_in(tmp_path / "checkpoints").save(1, write)
    assert result.folder is None and "Error" in str(result.error)


def test_what_a_killed_save_left_goes_and_what_it_was_to_replace_comes_back(tmp_path):
    store = store_in(tmp_path)
    store.save(1, write)
    # Killed between its two renames; and one killed while it was writing.
    store.folder_of(1).rename(tmp_path / ".old_step_000001")
    write(tmp_path / ".writing_step_000001")
    write(tmp_path / ".writing_17_step_000002")
    write(tmp_path / ".forgotten_step_000003")
    store.remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert damage(store.folder_of(1)) is None


@pytest.mark.parametrize("name", [".my_step_000001", ".old_step_1", ".writing_a_step_000001", ".old_step_000001.tar"])
def test_what_no_save_has_named_is_left_alone(name, tmp_path):
    write(tmp_path / name)
    store_in(tmp_path).remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_manifest_of_brackets_is_damage_and_is_written_over(tmp_path):
    store = store_in(tmp_path)
    assert store.save(1, write).folder
    (store.folder_of(1) / MANIFEST).write_text("[" * 200_000)
    assert "too many brackets" in str(damage(store.folder_of(1)))
    assert store.save(1, write).folder and damage(store.folder_of(1)) is None


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    store = store_in(tmp_path)
    write(tmp_path / ".writing_step_000003")
    write(tmp_path / "step_000004")
    assert store.steps() == []
