"""Which part of a stage a rank works in, and which it waits for others, by looking at its main thread now and then.

What a device waits for inside a pass counts as work: there, ranks that wait look as busy as those that work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.supervision.rank_state import waits_for_others

_SECONDS = 0.05
# Of what was seen in earlier steps, in which a short stage may have passed unseen.
_KEPT = 0.7


@dataclass
class _Seen:
    """How often the main thread was looked at in a stage, and how often it worked."""

    num_looks: float = 0.0
    num_working: float = 0.0


class WorkSampler:
    """Looks at the main thread of this process some times a second."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._ended = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look within the block."""
        self._ended.clear()
        thread = threading.Thread(target=self._run, name="work-sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def working_seconds(self, stage_seconds: Mapping[str, float]) -> dict[str, float]:
        """The part of each stage's seconds in which this rank worked; called once per step."""
        working = {}
        for stage, seconds in stage_seconds.items():
            seen = self._seen.get(stage, _Seen())
            working[stage] = seconds * (seen.num_working / seen.num_looks if seen.num_looks >= 1.0 else 1.0)
        for stage, seen in list(self._seen.items()):
            self._seen[stage] = _Seen(_KEPT * seen.num_looks, _KEPT * seen.num_working)
        return working

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            seen = self._seen.setdefault(activity.stage, _Seen())
            seen.num_looks += 1
            seen.num_working += not waits_for_others()


work_sampler = WorkSampler()
"""that of this process"""
