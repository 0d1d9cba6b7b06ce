"""The next token of each row of the native engine, and whether it is the row's last.

Shape letters: `B` rows, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.engines.generation.native.running_rows import Row
from spmdrl.engines.generation.native.sampling import RowSampling, draw
from spmdrl.engines.generation.native.stop_strings import Decode, completes_stop_string
from spmdrl.engines.generation.protocol import Finish


class RowDrawer:
    """Draws tokens as each row's request says."""

    def __init__(self, device: torch.device, decode: Decode | None):
        """Rows with stop strings need `decode`, the text of tokens."""
        self._device = device
        self._decode = decode
        self._sampling: tuple[list[Row], RowSampling] | None = None

    @property
    def reads_text(self) -> bool:
        """Whether rows may have stop strings."""
        return self._decode is not None

    def __call__(self, rows: list[Row], logits_BV: Tensor, version: int) -> list[tuple[Row, Finish]]:
        """Append to each row its next token; returns the rows that end with it, and why.

        Raises RuntimeError where logits aren't finite.
        """
        positions_B = torch.tensor([row.length for row in rows], device=self._device)
        drawn = draw(logits_BV, positions_B, self._sampling_of(rows))
        if not drawn.logprobs_B.isfinite().all():
            raise RuntimeError(f"the logits of policy version {version} aren't finite; its weights are broken")
        ended = []
        for row, token, logprob in zip(rows, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
            finish = self._finish(row)
            if finish is not None:
                ended.append((row, finish))
        return ended

    def forget(self) -> None:
        """Keep no rows."""
        self._sampling = None

    def _sampling_of(self, rows: list[Row]) -> RowSampling:
        # Most steps draw for the rows of the one before.
        if self._sampling is None or self._sampling[0] != rows:
            seeds, sampling = [row.seed for row in rows], [row.request.sampling for row in rows]
            self._sampling = (rows, RowSampling.of_rows(seeds, sampling, self._device))
        return self._sampling[1]

    def _finish(self, row: Row) -> Finish | None:
        """Why the row ends with its newest token, or None if it goes on."""
        finish, stop_strings = row.finish, row.request.sampling.stop_strings
        if finish != "stop" and stop_strings:
            assert self._decode is not None, f"row {row.row} has stop strings, which submit refuses"
            if completes_stop_string(row.token_ids, stop_strings, self._decode):
                return "stop"
        return finish
