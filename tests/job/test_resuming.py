"""Which checkpoint a run goes on from, and when it refuses to."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.engines.training.checkpoints.manifest import MANIFEST
from spmdrl.job.run.resuming import RUN_FILE, ResumePoint, Resuming, RunRecord
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.device import Device
from spmdrl.resources.world import World
from spmdrl.runtime.launch import read_launch_environment

IDENTITY = {"seed": 0, "the model's hidden_size": 64, "data.train": "a.jsonl", "rows of data.train": "12ab"}
WORLD = World(read_launch_environment({}), Device("cpu"))


def config_of(folder, resume="auto"):
    return load_config([], [f"run.dir={folder}", "model.make={}", "data.train=x.jsonl", f"resume={resume}"]).value


def store_with(folder, steps, record=lambda step: RunRecord(step, IDENTITY).to_json()):
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig(keep_last=9), is_main=True, required=(RUN_FILE,))
    for step in steps:

        def write(aside: Path, step=step) -> list[Path]:
            (aside / RUN_FILE).write_text(record(step))
            return [aside / RUN_FILE]

        assert store.save(step, write).folder is not None
    return store


def resuming(store, notes, resume="auto", identity=IDENTITY) -> Resuming:
    config = config_of(store.root.parent, resume)
    return Resuming(store, config, WORLD, identity=identity, console=Console(stream=notes))


def find(store, resume="auto", identity=IDENTITY) -> tuple[ResumePoint | None, list[str]]:
    """The checkpoint that is chosen, and what is printed about it."""
    notes = io.StringIO()
    return resuming(store, notes, resume, identity).point, notes.getvalue().splitlines()


class LaterFilesAreDamaged:
    """A state that can't be read from checkpoints of later steps."""

    def __init__(self, last_sound: str):
        self._last_sound = last_sound

    def read_from(self, folder: Path) -> None:
        if folder.name > self._last_sound:
            raise KeyError(f"{folder.name} lacks a tensor")


def test_the_newest_sound_checkpoint_is_taken_and_damage_is_said(tmp_path):
    store = store_with(tmp_path, [2, 4, 6])
    (store.folder_of(6) / MANIFEST).write_text("null")
    point, notes = find(store)
    assert point.folder == store.folder_of(4) and point.record == RunRecord(4, IDENTITY)
    assert len(notes) == 1 and "damaged checkpoint passed over" in notes[0] and "step_000006" in notes[0]


def test_a_checkpoint_that_turns_out_to_be_unreadable_is_passed_over(tmp_path):
    store, notes = store_with(tmp_path, [2, 4, 6]), io.StringIO()
    chosen = resuming(store, notes)
    assert chosen.point.folder == store.folder_of(6)
    assert chosen.read(LaterFilesAreDamaged("step_000002")).folder == store.folder_of(2)
    assert "step_000006: KeyError: 'step_000006 lacks a tensor'" in notes.getvalue()


def test_without_any_checkpoint_the_run_begins(tmp_path):
    assert find(store_with(tmp_path, [])) == (None, [])


def test_with_nothing_but_damage_it_stops_with_the_reasons_and_deletes_nothing(tmp_path):
    store = store_with(tmp_path, [2, 4])
    for step in (2, 4):
        (store.folder_of(step) / RUN_FILE).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        ConfigError, match=r"every checkpoint .* is damaged.*step_000004: run.json.*step_000002: run.json"
    ):
        find(store)
    assert sorted(tmp_path.rglob("*")) == before


RECORDS = {
    "another step": json.dumps({"step": 7, "identity": {}}),
    "no object": "[]",
    "no JSON": "{",
    "nested too deeply": "[" * 100_000,
    "no identity": json.dumps({"step": 4}),
    "an identity that is null": json.dumps({"step": 4, "identity": None}),
    "a step that is a text": json.dumps({"step": "4", "identity": {}}),
    "metrics that are a list": json.dumps({"step": 4, "identity": {}, "metrics": [1]}),
    "metrics that are texts": json.dumps({"step": 4, "identity": {}, "metrics": {"reward": "high"}}),
    "an interval that is a number": json.dumps({"step": 4, "identity": {}, "accuracy_before_interval": 1}),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_that_is_broken_inside_right_digests_is_damage(tmp_path, kind):
    store = store_with(tmp_path, [2])
    store_with(tmp_path, [4], lambda step: RECORDS[kind])
    point, notes = find(store)
    assert point.folder == store.folder_of(2) and RUN_FILE in notes[0]


def test_a_checkpoint_of_another_model_or_data_is_refused_with_what_differs(tmp_path):
    store = store_with(tmp_path, [2])
    with pytest.raises(
        ConfigError, match=r"another run: the model's hidden_size was 64 and is 128; set run.dir to a new one"
    ):
        find(store, identity=IDENTITY | {"the model's hidden_size": 128})
    with pytest.raises(ConfigError, match="rows of data.train was '12ab' and is '34cd'"):
        find(store, identity=IDENTITY | {"rows of data.train": "34cd"})
    # The same rows under another name are the same run.
    assert find(store, identity=IDENTITY | {"data.train": "b.jsonl"})[0] is not None


def test_what_an_earlier_version_did_not_record_is_said(tmp_path):
    store = store_with(tmp_path, [2], lambda step: json.dumps({"step": step, "identity": {"seed": 0}}))
    point, notes = find(store)
    assert point is not None and "doesn't record the model's hidden_size, data.train" in notes[0]


def test_only_sound_steps_are_offered(tmp_path):
    store = store_with(tmp_path, [2, 4, 6])
    (store.folder_of(4) / RUN_FILE).unlink()
    with pytest.raises(ConfigError, match=r"run.json is missing; steps that can: \[2, 6\]"):
        find(store, resume="4")
    assert find(store, resume="2")[0].folder == store.folder_of(2)
    assert find(store, resume=str(store.folder_of(6)))[0].folder == store.folder_of(6)


@pytest.mark.parametrize(
    ("resume", "advice"), [("alway", "auto goes on"), ("nevr", "never starts anew"), ("²", "a step")]
)
def test_a_misspelt_resume_is_refused(tmp_path, resume, advice):
    with pytest.raises(ConfigError, match=advice):
        config_of(tmp_path, resume)
