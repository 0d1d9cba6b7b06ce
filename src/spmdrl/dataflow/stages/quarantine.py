"""Prompts whose rewards or tools hung or killed a worker twice: recorded in a file of the run, and not tried again.

Each strike is a line of `quarantine.jsonl`. A step that is repeated after a restart doesn't count twice, unless one of
its calls was pending when the watchdog ended the job.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

from spmdrl.observability.jsonl import JsonlWriter, read_jsonl, to_json
from spmdrl.resources.collectives import broadcast_bytes, gather_bytes
from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.workers.strikes import MOST_STRIKES, Strikes

QUARANTINE_FILE = "quarantine.jsonl"
_MAX_TEXT = 2000


class Quarantine:
    """Strikes of all ranks. Collective: the constructor reads the file, so that all ranks refuse the same."""

    def __init__(self, strikes: Strikes, folder: Path, *, is_main: bool, start_step: int):
        self.strikes = strikes
        self._writer = JsonlWriter(folder / QUARANTINE_FILE) if is_main else None
        if self._writer is not None:
            # A file of its own: a job that lost the folder, and still runs, has the previous one.
            self._writer.truncate_after(sys.maxsize)
        known = json.dumps(_counts(folder / QUARANTINE_FILE, start_step)).encode() if is_main else None
        self._counts = Counter(json.loads(broadcast_bytes(known)))
        strikes.learn(self._counts)
        if self._writer is not None:
            refused = sorted(name for name, count in self._counts.items() if count >= MOST_STRIKES)
            for name in refused:
                show(f"prompt {name} is in quarantine, as it cost {MOST_STRIKES} workers or ends of the job before")
        activity.on_wedged = partial(_write_wedged, folder / QUARANTINE_FILE, strikes)

    def exchange(self, step: int) -> None:
        """Share new strikes, and write them down. Collective over all ranks."""
        own = [
            {"prompt": one.subject.name, "reason": one.reason[:_MAX_TEXT], "text": one.subject.text[:_MAX_TEXT]}
            for one in self.strikes.take_new()
        ]
        of_ranks = [json.loads(payload) for payload in gather_bytes(json.dumps(own).encode())]
        found = Counter(one["prompt"] for strikes in of_ranks for one in strikes)
        self.strikes.learn(found - Counter(one["prompt"] for one in own))
        for one in (one for strikes in of_ranks for one in strikes):
            self._counts[one["prompt"]] += 1
            count = self._counts[one["prompt"]]
            if self._writer is not None:
                self._writer.write({"step": step, "quarantined": count >= MOST_STRIKES, **one})
            if self._writer is not None and count == MOST_STRIKES:
                show(f"prompt {one['prompt']} is in quarantine, as it cost {count} workers: {one['reason']}")


def _write_wedged(path: Path, strikes: Strikes, reason: str) -> None:
    """Write a strike for each of this rank's pending calls, from another thread and as the job ends.

    Other ranks may do so at the same time: the lines are appended at once.
    """
    about = {"step": activity.step, "quarantined": False, "ended_job": True, "reason": reason[:_MAX_TEXT]}
    lines = [{**about, "prompt": one.name, "text": one.text[:_MAX_TEXT]} for one in strikes.under_way()]
    with suppress(OSError), open(path, "ab", buffering=0) as file:
        file.write("".join(to_json(line) + "\n" for line in lines).encode())


def _counts(path: Path, start_step: int) -> dict[str, int]:
    """Count strikes by prompt. In repeated steps, only those that ended the job or led to quarantine count."""
    counts: Counter[str] = Counter()
    kept = set()
    for one in read_jsonl(path) if path.exists() else ():
        if isinstance(one.get("prompt"), str) and isinstance(one.get("step"), int):
            counts[one["prompt"]] += one["step"] <= start_step or one.get("ended_job") is True
            kept |= {one["prompt"]} if one.get("quarantined") is True else set()
    return {name: MOST_STRIKES if name in kept else count for name, count in counts.items() if count or name in kept}
