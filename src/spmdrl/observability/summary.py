"""summary.json: a run's outcome as one object, for people, the report and other programs."""

from __future__ import annotations

import contextlib
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from spmdrl.observability.jsonl import read_object, to_json, write_atomic

SUMMARY_FILE = "summary.json"
_ROOM_FILE = ".summary.room"
_ROOM_BYTES = 1 << 16
VERB_SUMMARY_FILE = "{verb}.summary.json"
AT_K = "pass_at_"
"""prefix of k in the names of a pass@k"""
ALWAYS_THERE = (
    "verdict", "steps", "reward_first", "reward_last", "accuracy_before", "accuracy_after", "seconds", "checkpoint",
    "report",
)  # fmt: skip


def write_summary(run_dir: Path, **fields: Any) -> Path:
    """Write `fields` into summary.json, atomically; fields written earlier stay, and unknown ones are null.

    A run writes it at its start (verdict "running", versions, devices), so that it is there after a crash,
    and again at its end, in the room of `keep_room`. Paths become strings.
    """
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}
    content = dict.fromkeys(ALWAYS_THERE) | read_summary(run_dir) | plain
    path = Path(run_dir) / SUMMARY_FILE
    room = path.with_name(_ROOM_FILE) if fields.get("verdict", "running") != "running" else None
    write_atomic(path, to_json(content, indent=2) + "\n", aside=room)
    return path


def keep_room(run_dir: Path) -> None:
    """Reserve a summary's room, so that a run's end can be written even on a full disk."""
    (Path(run_dir) / _ROOM_FILE).write_bytes(bytes(_ROOM_BYTES))


def write_verb_summary(run_dir: Path, verb: str, fields: Mapping[str, Any]) -> Path:
    """Write the results of a verb that doesn't train into its own file: the folder may be a training run's."""
    path = Path(run_dir) / VERB_SUMMARY_FILE.format(verb=verb)
    write_atomic(path, to_json(dict(fields), indent=2) + "\n")
    return path


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the fields of summary.json, or none if the file is missing or broken."""
    return read_object(Path(run_dir) / SUMMARY_FILE)


def passes_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return each pass@k of a run's summary, in order of k, with the prefix of its names there.

    Empty if rewards aren't verdicts.
    """
    if fields.get("rewards_are_verdicts") is False:
        return {}
    found = (re.fullmatch(rf"{AT_K}(\d+)_after", name) for name in fields)
    return {f"pass@{k}": f"{AT_K}{k}" for k in sorted(int(name.group(1)) for name in found if name)}


def provenance() -> dict[str, str]:
    """Return the job's command, host, start time and, in a git clone, commit."""
    facts = {
        "command": shlex.join(sys.orig_argv),
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    source = Path(__file__).parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # Only reads names of folders and commits: runs nothing of the repository.
        command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()  # noqa: S607
        facts["commit"] = commit
    return facts


def software_versions() -> dict[str, str]:
    """Return the versions that a result depends on, read from the installed packages without importing them."""
    versions = {"python": platform.python_version()}
    for package in ("spmdrl", "torch", "transformers", "vllm", "torch_npu"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
