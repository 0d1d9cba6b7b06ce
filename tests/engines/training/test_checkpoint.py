"""Checkpoint folders are complete or not there."""

from __future__ import annotations

import json

import pytest

from spmdrl.engines.training.checkpoint import MANIFEST, CheckpointConfig, CheckpointStore, damage


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
    assert store.steps() == [10, 20, 25]
    assert damage(store.folder_of(25)) is None
    assert store.newest_sound() == (25, [])
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
def test_damage_is_found_and_the_checkpoint_before_is_used(tmp_path, spoil, word):
    store = store_in(tmp_path)
    store.save(1, write)
    store.save(2, write)
    spoil(store.folder_of(2))
    step, complaints = store.newest_sound()
    assert step == 1
    assert len(complaints) == 1 and word in complaints[0]


def test_a_failed_save_leaves_the_earlier_one_and_nothing_half_written(tmp_path):
    store = store_in(tmp_path)
    store.save(1, write)

    def disk_full(folder):
        write(folder)
        raise OSError(28, "No space left on device")

    result = store.save(2, disk_full)
    assert result.folder is None and "No space left" in str(result.error)
    assert store.steps() == [1] and not list(tmp_path.glob(".writing*"))


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    store = store_in(tmp_path)
    write(tmp_path / ".writing_step_000003")
    write(tmp_path / "step_000004")
    assert store.steps() == [] and store.newest_sound() == (None, [])
