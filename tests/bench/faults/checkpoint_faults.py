"""Checkpoints whose writer dies, whose disk is full, or whose files change: a sound one is loaded, and no other."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import torch

from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.engines.training.checkpoints.manifest import MANIFEST, damage
from spmdrl.engines.training.checkpoints.trainer_state import ShardFiles, write_shards
from spmdrl.engines.training.sharded_model import Shard
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from tests.bench.faults.fault_tally import Tally
from tests.bench.faults.planned_faults import VARIABLE, arm_fault

_POINTS = ("checkpoint.write", "checkpoint.fsync", "checkpoint.rename")
_REQUIRED = ("run.json", "trainer/shards_00000.safetensors")
_SIZE = 4096
_MOST_PASSES = 100


def crashes(root: Path, *, is_short: bool) -> list[Tally]:
    """A process that saves is killed at each write, fsync and rename; also where a save replaces a checkpoint."""
    tally = Tally("R3", "SIGKILL at each write, fsync and rename of a checkpoint")
    kinds = [("a new step", (1, 2)), ("the same step", (2, 2)), ("one that is forgotten", (1, 2, 3))]
    for what, steps in kinds[:1] if is_short else kinds:
        for point in _POINTS:
            for number in range(_MOST_PASSES):
                store = _store(root / f"{what}_{point}_{number}")
                for step in steps[:-1]:
                    _save(store, step)
                with tally.timed(f"{what}, {point} {number}") as problems:
                    is_killed = _die_in(partial(_save_and_forget, store, steps[-1]), point, number)
                    problems += _lacks(store, steps)
                shutil.rmtree(store.root)
                if not is_killed:
                    break
    return [tally]


def full_disk(root: Path) -> list[Tally]:
    """The disk refuses each write, fsync and rename in turn."""
    tally = Tally("R10", "no space at each write, fsync and rename of a checkpoint")
    for point in _POINTS:
        for number in range(_MOST_PASSES):
            store = _store(root / f"full_{point}_{number}")
            _save(store, 1)
            with tally.timed(f"{point} {number}") as problems:
                with contextlib.redirect_stderr(io.StringIO()):
                    arm_fault({VARIABLE: f"{point}:0:0:enospc:{number}"})
                    result = store.save(2, lambda folder: _write(folder, 2))
                    arm_fault({})
                # Behind its last rename a new one is whole, though the disk refuses to say so.
                if 1 not in store.steps() or list(store.root.glob(".*")):
                    problems.append(f"{[path.name for path in store.root.iterdir()]} are left")
                problems += _lacks(store, (1, 2))
            if result.folder is not None:
                break
    return [tally]


def changes(root: Path, *, count: int) -> list[Tally]:
    """Random byte flips, cuts, growth, missing and swapped files: all are found before a tensor is read."""
    store, random, tallies = _store(root / "changed"), Random(0), []  # noqa: S311 - no secret
    _save(store, 1)
    folder = store.folder_of(1)
    kinds: dict[str, Callable[[Path, Random], None]] = {
        "flipped byte": _flip, "cut file": _cut, "longer file": _grow, "missing file": _lose, "swapped files": _swap,
    }  # fmt: skip
    for kind, change in kinds.items():
        tally = Tally("R4", f"{kind} of a checkpoint")
        for _ in range(count if change is _flip else max(1, count // 10)):
            copy = root / "copy" / folder.name
            shutil.copytree(folder, copy)
            path = random.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
            change(path, random)
            with tally.timed(f"{kind} {path.name}") as problems:
                if damage(copy, _REQUIRED) is None:
                    problems.append("it was not found")
            shutil.rmtree(copy)
        tallies.append(tally)
    return tallies


def _store(root: Path) -> CheckpointStore:
    return CheckpointStore(root, CheckpointConfig(keep_last=2), is_main=True, required=_REQUIRED)


def _write(folder: Path, step: int) -> list[Path]:
    (folder / "trainer").mkdir()
    tensors = {f"weight/{name}": torch.full((_SIZE,), float(step)) for name in "ab"}
    shards = {
        key: Shard(tensor, whole_slice(key.partition("/")[2], tensor.shape), tuple(tensor.shape))
        for key, tensor in tensors.items()
    }
    paths = [write_shards(folder / "trainer", 0, shards)]
    for name in ("run.json", "samples.json"):
        (folder / name).write_text(json.dumps({"step": step, "of": name}))
        paths.append(folder / name)
    return paths


def _save(store: CheckpointStore, step: int) -> None:
    assert store.save(step, lambda folder: _write(folder, step)).folder is not None


def _save_and_forget(store: CheckpointStore, step: int) -> None:
    _save(store, step)
    store.forget_old(step)


def _die_in(action: Callable[[], None], point: str, number: int) -> bool:
    """Run the action in a process of its own, killed at the point; whether it came there."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        arm_fault({VARIABLE: f"{point}:0:0:sigkill:{number}"})
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _lacks(store: CheckpointStore, steps: tuple[int, ...]) -> list[str]:
    """What is missing of the promise: every folder under its name is sound, and the newest is one of the last two."""
    store.remove_leftovers()
    found = store.steps()
    if not found or found[-1] not in steps[-2:]:
        return [f"steps {found} are left of {steps}"]
    for step in found:
        if (problem := damage(store.folder_of(step), _REQUIRED)) is not None:
            return [f"step {step}: {problem}"]
        value = ShardFiles(store.folder_of(step) / "trainer").read("weight", whole_slice("a", (_SIZE,)))
        if not bool((value == step).all()):
            return [f"step {step} has other weights"]
    return [f"{path.name} is left" for path in store.root.glob(".*")]


def _flip(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, random: Random) -> None:
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def _grow(path: Path, random: Random) -> None:
    path.write_bytes(path.read_bytes() + random.randbytes(1 + random.randrange(64)))


def _lose(path: Path, random: Random) -> None:
    path.unlink()


def _swap(path: Path, random: Random) -> None:
    folder = path.parents[1] if path.parent.name == "trainer" else path.parent
    others = [other for other in folder.rglob("*") if other.is_file() and other != path and other.name != MANIFEST]
    other = random.choice(sorted(others))
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)
