"""How long the responses to each prompt were, so that a step can share them out before they are generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text
from spmdrl.nouns.batch import Integers

LENGTHS = "response_lengths.json"
_PARTS = 256
"""Means are kept in these parts of a token."""


class LengthHistory:
    """The mean response length of each prompt that the run has seen, by the prompt's id; the same on every rank.

    Each group counts as much as all groups before it, as the policy moves on. Whole numbers only, so that a resumed run
    and every platform expect the same.
    """

    def __init__(self, *, is_main: bool = False):
        self._means: dict[str, int] = {}
        self._sum = 0
        self._is_main = is_main

    def expected(self, prompts: Sequence[Prompt]) -> list[int] | None:
        """Tokens that a response to each prompt is expected to have; None where no prompt has been seen at all.

        A prompt that has not been seen counts as the mean of all those that have.
        """
        if not self._means:
            return None
        unseen = self._sum // len(self._means)
        return [-(-self._means.get(prompt.id, unseen) // _PARTS) for prompt in prompts]

    def observe(self, prompts: Sequence[Prompt], lengths_GN: Integers) -> None:
        """Take the lengths of finished responses; where a group has none, they are -1."""
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
        """Take the lengths back; a checkpoint without any begins with none."""
        path = folder / LENGTHS
        self._means = json.loads(path.read_text())["means"] if path.is_file() else {}
        self._sum = sum(self._means.values())
