"""Where a run goes on: which of its checkpoints is sound, is of this very run, and holds what training needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from spmdrl.config.config import Config
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.engines.training.checkpoints.manifest import damage, read_manifest
from spmdrl.job.model.model_source import MODEL
from spmdrl.job.run.best_checkpoint import BestStep
from spmdrl.job.run.run_folder import on_main
from spmdrl.job.start.run_identity import OPTIONAL, ROWS
from spmdrl.resources.world import World

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunRecord:
    """What a checkpoint holds of its run beside the training state; stored as run.json."""

    step: int
    identity: Mapping[str, Any]
    is_finished: bool = False
    first_metrics: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    accuracy_before: float | None = None
    accuracy_before_interval: list[float] | None = None
    best: BestStep | None = None
    is_resumable: bool = True
    """whether the trainer's state is there"""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def of_json(cls, content: object) -> RunRecord:
        """Raises ValueError for anything but such a record; fields of later versions are left out."""
        if not isinstance(content, dict):
            raise ValueError(f"{RUN_FILE} holds a {type(content).__name__}, not an object")
        known = {one.name: content[one.name] for one in fields(cls) if one.name in content}
        is_right = {
            "step": lambda value: type(value) is int and value >= 0,
            "identity": lambda value: isinstance(value, dict),
            "is_finished": lambda value: isinstance(value, bool),
            "first_metrics": _are_numbers,
            "metrics": _are_numbers,
            "is_resumable": lambda value: isinstance(value, bool),
            "best": lambda value: value is None or _is_best(value),
            "accuracy_before": lambda value: value is None or _is_number(value),
            "accuracy_before_interval": lambda value: value is None or _is_interval(value),
        }
        wrong = [name for name in ("step", "identity") if name not in known]
        wrong += [name for name, value in known.items() if not is_right[name](value)]
        if wrong:
            raise ValueError(f"{RUN_FILE} has no usable {wrong[0]}")
        if known.get("best") is not None:
            known["best"] = BestStep(**known["best"])
        return cls(**known)


@dataclass(frozen=True)
class ResumePoint:
    """A sound checkpoint to go on from."""

    folder: Path
    record: RunRecord


def find_resume_point(
    store: CheckpointStore, config: Config, world: World, identity: Mapping[str, Any], passed_over: Mapping[Path, str]
) -> tuple[ResumePoint | None, list[str]]:
    """The checkpoint that `resume` allows, or None to begin with the first step; and notes for the screen. Collective.

    `passed_over` has the folders that turned out to be damaged, and how. Raises ConfigError on every rank where the
    checkpoints there can't be used, or belong to another run.
    """

    def choose() -> list[Any]:
        folder, notes = _chosen_folder(store, config, passed_over)
        if folder is None:
            return [None, None, notes]
        record = read_record(folder)
        return [str(folder), asdict(record), notes + _check_record(record, folder, identity, config)]

    folder, record, notes = on_main(world, choose)
    return (None if folder is None else ResumePoint(Path(folder), RunRecord.of_json(record))), notes


def read_record(folder: Path) -> RunRecord:
    """A checkpoint's record of its run. Raises ValueError where it is damaged."""
    try:
        content = json.loads((folder / RUN_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as failure:
        raise ValueError(f"{RUN_FILE} can't be read ({type(failure).__name__}: {failure})") from None
    return RunRecord.of_json(content)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two identities disagree on; keys that only one of them has are left out, but for optional ones."""
    changed = [key for key in now if key in before and before[key] != now[key]]
    if before.get(ROWS) == now.get(ROWS) is not None:
        # The same rows in another place.
        changed = [key for key in changed if key != "data.train"]
    changed += [key for key in OPTIONAL if (key in before) != (key in now)]
    return [f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in changed]


def _chosen_folder(
    store: CheckpointStore, config: Config, passed_over: Mapping[Path, str]
) -> tuple[Path | None, list[str]]:
    wanted = config.resume
    if wanted not in ("auto", "never"):
        folder = store.folder_of(int(wanted)) if is_step(wanted) else Path(wanted)
        problem = _damage_of(store, folder, passed_over)
        if problem is not None:
            sound = [step for step in store.steps() if _damage_of(store, store.folder_of(step), passed_over) is None]
            raise ValueError(f"resume is {wanted!r}, but {folder} can't be used: {problem}; steps that can: {sound}")
        return folder, []
    complaints: list[str] = []
    for step in reversed(store.steps()):
        folder = store.folder_of(step)
        problem = _damage_of(store, folder, passed_over)
        if problem is None:
            return folder, [f"WARNING: damaged checkpoint passed over: {complaint}" for complaint in complaints]
        complaints.append(f"{folder}: {problem}")
    if complaints:
        raise ValueError(
            f"every checkpoint in {store.root} is damaged, and none was touched: {'; '.join(complaints)}; restore one "
            f"of them, or start anew with resume=never, which moves this folder aside"
        )
    return None, []


def is_step(wanted: str) -> bool:
    """Whether `resume` is a step's number, rather than a folder."""
    return wanted.isascii() and wanted.isdigit()


def _damage_of(store: CheckpointStore, folder: Path, passed_over: Mapping[Path, str]) -> str | None:
    """As the store finds it; also a record that isn't the one of this folder's step."""
    if folder in passed_over:
        return passed_over[folder]
    problem = damage(folder, store.required)
    if problem is not None:
        return problem
    try:
        record, manifest = read_record(folder), read_manifest(folder)
    except (OSError, ValueError) as failure:
        return str(failure)
    return None if record.step == manifest.step else f"its {RUN_FILE} is of step {record.step}, not {manifest.step}"


def _check_record(record: RunRecord, folder: Path, identity: Mapping[str, Any], config: Config) -> list[str]:
    """Raises ValueError for a checkpoint of another run, or without a trainer's state; returns notes."""
    changed = differences(record.identity, identity)
    if changed:
        raise ValueError(
            f"{folder} belongs to another run: {'; '.join(changed)}; set {config.run.folder_key} to a new one, or "
            "resume=never to start anew in this folder (model.path takes the model of a checkpoint)"
        )
    if not record.is_resumable:
        raise ValueError(
            f"{folder} was written with checkpoint.model_only, so that nothing is there to go on with; resume=never "
            f"starts anew, resume=STEP takes an earlier checkpoint, and model.path={folder / MODEL} begins another run"
        )
    unknown = [key for key in identity if key not in record.identity and key not in OPTIONAL]
    return [f"{folder} doesn't record {', '.join(unknown)}; taken to be the same as now"] if unknown else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_interval(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_best(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"metric", "step", "value"}
        and isinstance(value["metric"], str)
        and type(value["step"]) is int
        and _is_number(value["value"])
    )
