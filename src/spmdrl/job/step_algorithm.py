"""The algorithm as a step uses it: what it adapts from step to step is a part of the run's state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text

STATE = "algorithm.json"


class StepAlgorithm:
    """Holds the algorithm of the present step, the same on every rank."""

    def __init__(self, algorithm: Algorithm, *, is_main: bool):
        self.now = algorithm
        self._first = algorithm
        self._is_main = is_main

    def adapt(self, values: Mapping[str, float]) -> None:
        """Go on with these values of keys that change."""
        self.now = replace(self._first, config=replace(self._first.config, **values)) if values else self._first

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the keys that change, if there are any."""
        values = {key: getattr(self.now.config, key) for key in sorted(self.now.adapted_keys)}
        if values and self._is_main:
            add_text(writes, folder / STATE, json.dumps(values) + "\n")

    def read_from(self, folder: Path) -> None:
        """Take back the keys that change; where an earlier part of the run changed none, they begin as configured."""
        saved = json.loads((folder / STATE).read_text()) if (folder / STATE).is_file() else {}
        self.adapt({key: float(saved[key]) for key in self._first.adapted_keys & saved.keys()})
