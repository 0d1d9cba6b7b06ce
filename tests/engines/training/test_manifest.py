"""Whatever stands in a checkpoint's folder: damage is found, and nothing that is read raises."""

from __future__ import annotations

import json
import os
import random

import pytest

from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.engines.training.checkpoints.manifest import MANIFEST, damage, read_manifest, step_of_folder
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig

FUZZ = int(os.environ.get("SPMDRL_FUZZ", "300"))
NAMES = ("run.json", "model/config.json", "trainer/shards_00000.safetensors", "trainer/shards_00001.safetensors")
REQUIRED = ("run.json", "model/config.json")


def write(folder):
    paths = [folder / name for name in NAMES]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode() * 7)
    return paths


@pytest.fixture
def folder(tmp_path):
    return CheckpointStore(tmp_path, CheckpointConfig(), is_main=True).save(12, write).folder


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def some_bits(content, count):
    bits = range(len(content) * 8)
    return random.Random(1).sample(bits, min(count, len(bits)))


def test_a_flipped_bit_of_the_manifest_is_found_or_harmless(folder):
    path = folder / MANIFEST
    content, manifest = path.read_bytes(), read_manifest(folder)
    num_found = 0
    for bit in some_bits(content, FUZZ):
        path.write_bytes(flipped(content, bit))
        if damage(folder, REQUIRED) is not None:
            num_found += 1
        else:
            assert read_manifest(folder) == manifest, f"bit {bit} was neither found nor harmless"
    assert num_found > 0.9 * min(FUZZ, len(content) * 8)
    path.write_bytes(content)
    assert damage(folder, REQUIRED) is None


def test_a_flipped_bit_of_any_other_file_is_found(folder):
    for name in NAMES:
        path = folder / name
        content = path.read_bytes()
        for bit in some_bits(content, max(FUZZ // 10, 1)):
            path.write_bytes(flipped(content, bit))
            assert "was changed" in str(damage(folder, REQUIRED))
        path.write_bytes(content)


ENTRY = {"bytes": 3, "sha256": "0"}
ODD = {
    "empty": b"",
    "null": b"null",
    "a list": b"[1, 2]",
    "a number": b"7",
    "nested too deeply": b"[" * 200_000,
    "nested too deeply below files": b'{"step": 12, "files": {"a": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}}",
    "a huge number": b'{"step": ' + b"9" * 10_000 + b', "files": {}}',
    "a huge size": b'{"step": 12, "files": {"run.json": {"bytes": 1e999, "sha256": "0"}}}',
    "no UTF-8": b'{"step": 12, "files": {"\xff": {}}}',
    "half a character": b'{"step": 12, "files": {"\\ud800": {"bytes": 3, "sha256": "0"}}}',
    "no files": json.dumps({"step": 12, "files": {}}).encode(),
    "files that are a list": json.dumps({"step": 12, "files": list(NAMES)}).encode(),
    "no step": json.dumps({"files": dict.fromkeys(NAMES, ENTRY)}).encode(),
    "a step that is true": json.dumps({"step": True, "files": {}}).encode(),
    "an entry that is null": json.dumps({"step": 12, "files": dict.fromkeys(NAMES)}).encode(),
    "a size that is a text": json.dumps({"step": 12, "files": {"run.json": ENTRY | {"bytes": "3"}}}).encode(),
    "a digest that is a number": json.dumps({"step": 12, "files": {"run.json": ENTRY | {"sha256": 3}}}).encode(),
    "a file outside": json.dumps({"step": 12, "files": {"../../run.json": ENTRY}}).encode(),
    "an absolute name": json.dumps({"step": 12, "files": {"/etc/passwd": ENTRY}}).encode(),
    "a name with a NUL": json.dumps({"step": 12, "files": {"run\0json": ENTRY}}).encode(),
    "a name that is too long": json.dumps({"step": 12, "files": {"a" * 5000: ENTRY}}).encode(),
    "an empty name": json.dumps({"step": 12, "files": {"": ENTRY}}).encode(),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_manifest_is_damage(folder, kind):
    (folder / MANIFEST).write_bytes(ODD[kind])
    assert isinstance(damage(folder, REQUIRED), str)


def test_a_shortened_list_is_damage_though_all_that_it_lists_is_sound(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"]["trainer/shards_00001.safetensors"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert "digest is another" in str(damage(folder))
    # A list of an earlier version has no digest; then the file that stands there unlisted gives it away.
    del manifest["sha256_of_files"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert "trainer/shards_00001.safetensors is not listed" in str(damage(folder))


def test_a_flipped_bit_in_the_name_of_the_digest_is_found(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace("sha256_of", "sha257_of"))
    assert "'sha257_of_files', which no manifest has" in damage(folder, REQUIRED)


def test_a_list_of_an_earlier_version_is_read(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256_of_files"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert damage(folder, REQUIRED) is None


def test_folders_with_swapped_names_are_damage(folder):
    other = CheckpointStore(folder.parent, CheckpointConfig(), is_main=True).save(14, write).folder
    folder.rename(folder.parent / "aside")
    other.rename(folder)
    (folder.parent / "aside").rename(other)
    assert "holds step 14" in str(damage(folder)) and "holds step 12" in str(damage(other))


def test_a_copy_under_another_name_is_sound(folder):
    copy = folder.rename(folder.parent / "my favourite")
    assert damage(copy, REQUIRED) is None


@pytest.mark.parametrize(
    "name",
    ["step_²", "step_٣", "step_", "step_-1", "step_1", "step_ 00001", "step_" + "9" * 5000, "best", "step_000001x"],
)
def test_a_name_that_no_save_gives_is_no_step(tmp_path, name):
    assert step_of_folder(name) is None
    if len(name) < 200:
        write(tmp_path / name)
        (tmp_path / name / MANIFEST).write_text("{}")
        assert CheckpointStore(tmp_path, CheckpointConfig(), is_main=True).steps() == []


def test_steps_of_many_digits_have_folders_too():
    assert step_of_folder("step_000007") == 7 and step_of_folder("step_1234567") == 1234567


def test_only_what_is_read_of_a_folder_need_be_sound(folder):
    (folder / "trainer" / "shards_00000.safetensors").unlink()
    assert damage(folder, below="model/") is None
    (folder / "model" / "config.json").write_text("{}")
    assert "model/config.json has" in str(damage(folder, below="model/"))
