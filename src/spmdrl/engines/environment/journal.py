"""An environment's answers on disk: a run that was killed generates the same rows again, and makes no call twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spmdrl.engines.environment.environment_runner import StepResult, read_step
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.jsonl import JsonlWriter, read_jsonl
from spmdrl.runtime.supervision.activity import activity

FOLDER = "environment"
"""name in the run's folder"""


class Journal:
    """Answers since the newest checkpoint, a file per step and rank: asked -> answered -> written -> in a checkpoint.

    Failures aren't kept: a resumed run tries again.
    """

    def __init__(self, run_folder: Path, rank: int, start_step: int, saved_steps: Callable[[], Sequence[int]]):
        """Read all ranks' answers in steps after `start_step`. `saved_steps` returns those of checkpoints."""
        self._folder, self._rank, self._saved_steps = run_folder / FOLDER, rank, saved_steps
        self._asked: dict[Hashable, tuple[int, str]] = {}
        self._writer: JsonlWriter | None = None
        self._known = {
            (step, str(one.get("call"))): result
            for step, path in self._files()
            for one in (read_jsonl(path) if step > start_step else ())
            if (result := read_step(one.get("answer"))) is not None
        }

    def find(self, key: Hashable, call: Mapping[str, Any]) -> StepResult | None:
        """Return the recorded answer to a call; if there is none, it is asked under `key`."""
        # Log-probs of the same tokens differ in their last bits between layouts.
        told = [{**one, "turns": (), "logprobs": ()} for one in (call, *call.get("turns", ()))]
        digest = hashlib.blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
        if (known := self._known.pop((activity.step, digest), None)) is None:
            self._asked[key] = activity.step, digest
        return known

    def add(self, key: Hashable, result: StepResult) -> None:
        """Record the answer to the call that was asked under `key`, before it is used."""
        faultpoint("environment.answer")
        step, digest = self._asked.pop(key)
        if result.verdict is not None:
            return
        path = self._folder / f"{step:06d}.{self._rank}.jsonl"
        if self._writer is None or self._writer.path != path:
            self.close()
            self._writer = JsonlWriter(path)
        self._writer.write({"call": digest, "answer": asdict(result)})
        faultpoint("environment.record")

    def close(self) -> None:
        """Close the file, and delete those that a checkpoint makes unnecessary."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        newest = max(self._saved_steps(), default=-1)
        for step, path in self._files():
            if step <= newest:
                path.unlink(missing_ok=True)

    def _files(self) -> list[tuple[int, Path]]:
        return [(int(path.name.partition(".")[0]), path) for path in self._folder.glob("[0-9]*.*.jsonl")]
