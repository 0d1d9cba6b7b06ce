"""The teacher's likeliest tokens in the place of each response token, which a student's whole distribution is drawn to.

Shape letters: `R` packed response tokens that the model wrote; `J` likeliest tokens.
"""

from __future__ import annotations

from spmdrl.dataflow.stages.inference import Presence, ScoreStage, Seen
from spmdrl.dataflow.stages.rows import ModelTokens, token_rows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import Batch, WorkerState, offsets_of


class LikeliestTokensStage(ScoreStage):
    """Puts ids and log-probs of the teacher's likeliest tokens in each place, and the log-prob of all others."""

    def __init__(
        self, engine: TrainingEngine, presence: Presence, seen: Seen | None, *, num_likeliest: int, vocab_size: int
    ):
        """`vocab_size` is that of the policy: a larger teacher's further tokens have no text."""
        super().__init__(WorkerState.TEACHER_TOP, engine, presence, seen)
        self.num_likeliest = num_likeliest
        self.vocab_size = vocab_size

    def _scored(self, batch: Batch) -> Batch:
        rows = token_rows(batch, self.engine.config)
        found, model_tokens = self.engine.likeliest(rows, self.num_likeliest, self.vocab_size), ModelTokens.of(batch)
        scored, lengths_B = Batch(batch.rows), batch.lengths("response_ids")
        for name, values_RJ in (("ids", found.ids_RJ.int()), ("logprobs", found.logprobs_RJ)):
            offsets = offsets_of(lengths_B * values_RJ.shape[1])
            scored.put_ragged(f"teacher_top_{name}", model_tokens.spread(values_RJ).flatten(), offsets)
        return scored
