"""Response lengths by prompt, from which a step estimates costs before generation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text
from spmdrl.nouns.batch import Integers

LENGTHS = "response_lengths.json"
_PARTS = 256
"""Fractions of a token in which means are kept."""


class LengthHistory:
    """Moving average of response lengths by the prompt's id; the same on every rank.

    Each group counts as much as all earlier ones, as the policy changes. Integers only, so that resumed runs and all
    platforms agree.
    """

    def __init__(self, *, is_main: bool = False):
        self._means: dict[str, int] = {}
        self._sum = 0
        self._is_main = is_main

    def expected(self, prompts: Sequence[Prompt]) -> list[int] | None:
        """Return the expected response tokens of each prompt; None if no prompt has been seen yet.

        An unseen prompt gets the mean of all seen ones.
        """
        if not self._means:
            return None
        unseen = self._sum // len(self._means)
        return [-(-self._means.get(prompt.id, unseen) // _PARTS) for prompt in prompts]

    def observe(self, prompts: Sequence[Prompt], lengths_GN: Integers) -> None:
        """Add the lengths of finished responses; groups without any have -1."""
        for prompt, lengths in zip(prompts, lengths_GN.tolist(), strict=True):
            if min(lengths) >= 0:
                mean = sum(lengths) * _PARTS // len(lengths)
                before = self._means.get(prompt.id)
                after = mean if before is None else (before + mean) // 2
                self._sum += after - (before or 0)
                self._means[prompt.id] = after

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the lengths, if there are any."""
        if self._means and self._is_main:
            content = json.dumps({"parts_of_a_token": _PARTS, "means": self._means}) + "\n"
            add_text(writes, folder / LENGTHS, content)

    def read_from(self, folder: Path) -> None:
        """Restore the lengths; a checkpoint without any gives none."""
        path = folder / LENGTHS
        self._means = json.loads(path.read_text())["means"] if path.is_file() else {}
        self._sum = sum(self._means.values())
