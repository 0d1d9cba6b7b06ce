"""A stand-in for the part of wandb's documented API that a run uses: it writes each call as a JSON line.

https://docs.wandb.ai/ref/python/: `wandb.init`, `Run.log`, `Run.finish`, `wandb.Table`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any


class Table:
    def __init__(self, columns: Sequence[str], data: Sequence[Sequence[Any]]):
        assert all(len(row) == len(columns) for row in data), "wandb refuses rows that don't fit the columns"
        self.columns, self.data = list(columns), [list(row) for row in data]


class Run:
    def __init__(self) -> None:
        self._step = -1

    def log(self, data: dict[str, Any], step: int) -> None:
        # The real one drops these with a warning.
        assert step >= self._step, f"step {step} after {self._step}"
        self._step = step
        plain = {
            name: {"columns": value.columns, "data": value.data} if isinstance(value, Table) else value
            for name, value in data.items()
        }
        _write({"log": plain, "step": step})

    def finish(self) -> None:
        _write({"finish": True})


def init(
    *, project: str, name: str, config: dict[str, Any], dir: str, id: str,
    resume: str,
) -> Run:  # fmt: skip
    assert os.path.isdir(dir) and resume in ("allow", "must", "never", "auto")
    _write({"init": {"project": project, "name": name, "config": config, "id": id}})
    return Run()


def _write(line: dict[str, Any]) -> None:
    with open(os.environ["WANDB_STANDIN_FILE"], "a") as file:
        file.write(json.dumps(line) + "\n")
