"""Values where a response that was cut counts as going on: also of the state behind its last token.

Shape letters: `R` packed response tokens that the model wrote.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.dataflow.stages.inference import ScoreStage
from spmdrl.dataflow.stages.rows import TURNS, ModelTokens, token_rows
from spmdrl.nouns.batch import Batch, offsets_of
from spmdrl.nouns.settings.role_configs import END_VALUE
from spmdrl.resources.device import to_device


class CutValueStage(ScoreStage):
    """Also puts the value behind each row's last token, or 0 behind a response that ended by itself."""

    def _scored(self, batch: Batch) -> Batch:
        is_cut_B = batch.dense("finished") == 0
        longer = _with_end_state(batch, is_cut_B)
        found_R, ends_B = self._rate(token_rows(longer, self.engine.config)), ModelTokens.of(longer).offsets[1:] - 1
        is_own_R = is_cut_B.new_ones(len(found_R)).index_fill(0, ends_B[is_cut_B], False)
        scored = Batch(batch.rows)
        own_R = found_R[to_device(is_own_R.nonzero().squeeze(1), found_R.device)]
        scored.put_ragged(self.column, ModelTokens.of(batch).spread(own_R), batch.offsets("response_ids"))
        end_values_B = found_R[to_device(ends_B, found_R.device)]
        scored.put_dense(END_VALUE, end_values_B.where(to_device(is_cut_B, found_R.device), 0.0))
        return scored


def _with_end_state(batch: Batch, is_cut_B: Tensor) -> Batch:
    """The rows with one more token of the model at the end of those that were cut, before which a value is computed.

    Any token does, as no token before it sees it.
    """
    longer = Batch(batch.rows)
    longer.put_ragged("prompt_ids", batch.values("prompt_ids"), batch.offsets("prompt_ids"))
    offsets = batch.offsets("response_ids")
    # A cut row's last token stands twice.
    counts_T = torch.ones_like(batch.values("response_ids")).index_fill(0, offsets[1:][is_cut_B] - 1, 2)
    offsets = offsets + offsets_of(is_cut_B)
    longer.put_ragged("response_ids", batch.values("response_ids").repeat_interleave(counts_T), offsets)
    if TURNS in batch:
        turns = batch.values(TURNS).repeat_interleave(counts_T).index_fill(0, offsets[1:][is_cut_B] - 1, 1)
        longer.put_ragged(TURNS, turns, offsets)
    return longer
