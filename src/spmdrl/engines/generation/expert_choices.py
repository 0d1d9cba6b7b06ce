"""Which experts each token went to while it was generated, kept so that training can send it there again.

The prompt's tokens are fed for the whole group, then each response token but the last. What is kept of a row is
therefore one token short of it (R3, arXiv:2510.11370).

Shape letters: `T` tokens fed in one forward, `L` sparse layers, `C` chosen experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.int16


class ChoiceRecorder:
    """Keeps what the routers of one forward choose, and changes nothing; a `Route`."""

    def __init__(self) -> None:
        self._chosen: dict[int, Tensor] = {}

    def __call__(self, layer: int, scores_TE: Tensor, chosen_TC: Tensor) -> tuple[Tensor, Tensor]:
        assert scores_TE.shape[1] <= torch.iinfo(DTYPE).max, f"{scores_TE.shape[1]} experts don't fit in {DTYPE}"
        self._chosen[layer] = chosen_TC.to(DTYPE)
        return scores_TE, chosen_TC

    def take(self) -> Tensor:
        """The choices [T, L, C] of the last forward, on the host, and forget them; waits for the device."""
        taken = torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1).cpu()
        self._chosen.clear()
        return taken


class RowChoices:
    """The choices of one row's tokens, in the order in which they are fed."""

    def __init__(self, first: Tensor):
        """Start with those of some tokens [T, ...], which rows share: nothing may change them."""
        self._first = first
        self._later: list[Tensor] = []

    def feed(self, token_LC: Tensor) -> None:
        """Take in the choices of the newest token fed."""
        self._later.append(token_LC)

    def continued(self, fed_TLC: Tensor) -> RowChoices:
        """The same, and behind it the choices of those of the `fed_TLC` tokens, all from the first, that are new.

        Tokens fed a second time keep what was chosen when they were drawn from.
        """
        num_known = len(self._first) + len(self._later)
        return RowChoices(torch.cat((self.packed().view(num_known, -1), fed_TLC[num_known:].flatten(1))))

    def packed(self) -> Tensor:
        """All choices so far, flat: of each token fed, its experts in each sparse layer."""
        parts = [self._first.flatten()]
        if self._later:
            parts.append(torch.stack(self._later).flatten())
        return torch.cat(parts)
