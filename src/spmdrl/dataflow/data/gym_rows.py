"""Rows of a reasoning-gym task, named like a file: `reasoning_gym://chain_sum?max_terms=3&size=2000&seed=0`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from fractions import Fraction
from typing import Any

from spmdrl.engines.reward.gym_tasks import check_gym_installed, gym_task, score_of


def gym_rows(url: str) -> list[dict[str, Any]]:
    """Return the URL's rows: the question, its answer if it is one text, and the task's entry for its scorer.

    They are made in a process of their own: some tasks draw from sets, whose order differs from process to process, or
    from the global generator. Raises ValueError for unknown tasks, names and values.
    """
    check_gym_installed(url)
    made = subprocess.run(
        [sys.executable, "-m", __name__, url],
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise ValueError(f"{url}: {(made.stderr.splitlines() or ['the process that makes its rows was killed'])[-1]}")
    return [
        {"id": number, "prompt": entry["question"], "answer": entry["answer"], "task": url, "entry": entry}
        for number, entry in enumerate(json.loads(made.stdout.splitlines()[-1]))
    ]


def _made(url: str) -> list[dict[str, Any]]:
    random.seed(0)
    task = gym_task(url)
    entries = [task[number] for number in range(len(task))]
    first, kept = entries[0], json.loads(json.dumps(entries, default=_text))
    if score_of(task, first["answer"], first) != score_of(task, first["answer"], kept[0]):
        raise ValueError("the task's scorer needs entries with tuples, which JSON doesn't hold; choose another task")
    return kept


def _text(value: Any) -> str:
    if isinstance(value, Fraction):
        return str(value)
    raise ValueError(f"the task's entries hold a {type(value).__name__}, which JSON doesn't; choose another task")


if __name__ == "__main__":
    try:
        json.dump(_made(sys.argv[1]), sys.stdout)
    except ValueError as error:
        sys.exit(str(error))
