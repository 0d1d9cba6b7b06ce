"""From pairs of data rows to packed token rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmdrl.algorithms.terms.pairs import PAIR
from spmdrl.dataflow.data.learnt_rows import LearntRows
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.training.batching.packed_rows import TokenRows
from spmdrl.nouns.batch import offsets_of

SIGN = "sign"
"""1 at tokens of preferred responses, -1 at those of the others"""


def pair_rows(prompts: Sequence[Prompt], renderer: Renderer) -> TokenRows:
    """Each prompt with its preferred response, then with the other one; both end as their turn does."""
    learnt = LearntRows(renderer)
    rows = [row for prompt in prompts for row in learnt.of(prompt)]
    signs_B = torch.tensor([1.0, -1.0] * len(prompts))
    num_learnt_B = torch.tensor([sum(row.is_learnt) for row in rows], dtype=torch.int64)
    offsets = offsets_of([len(row.ids) for row in rows])
    return TokenRows(
        tokens_T=torch.tensor([token for row in rows for token in row.ids], dtype=torch.int64),
        offsets=offsets,
        prompt_lengths_B=offsets.diff() - num_learnt_B,
        response={SIGN: signs_B.repeat_interleave(num_learnt_B)},
        unit_size=PAIR,
    )
