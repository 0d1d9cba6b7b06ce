"""Probe of a switch: trainer and generator score the same few tokens before the new weights generate any.

Checksums show that slices arrived as sent; the probe shows that both engines compute the same with them.

Shape letters: `T` packed tokens, `R` packed response tokens, which here are all but the first of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.generation.protocol import GenerationEngine
from spmdrl.engines.training.packed_rows import TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import offsets_of
from spmdrl.resources.collectives import broadcast_ragged, max_over
from spmdrl.resources.rank_sets import RankSets

Rows = Sequence[Sequence[int]]

# Rounding reaches 1e-5 in float32 and some tenths in 16 bits, where unlikely tokens have coarse logits; misplaced
# weights differ by whole nats.
_TOLERANCE_IN_FLOAT32 = 0.01
_TOLERANCE_IN_16_BITS = 1.0
# In 16 bits a few tokens change an expert and then differ by nats; misplaced weights affect all.
_EXEMPT_OF_SPARSE_IN_16_BITS = 0.25


@dataclass(frozen=True)
class Rated:
    """Rows with the trainer's log-probs of their tokens at temperature 1."""

    rows: Rows
    logprobs_R: Tensor


class Probe:
    """Comparison of both engines' log-probs of a step's rows; each rank or replica computes them all."""

    def __init__(
        self,
        trainer: TrainingEngine | None,
        generator: GenerationEngine,
        rows_of_step: Callable[[int], Rows],
        *,
        tolerance: float,
        exempt_share: float = 0.0,
        sets: RankSets | None = None,
    ):
        """`rows_of_step` gives the same rows of at least two tokens on every rank; `tolerance` is in nats.

        The `exempt_share` of tokens that are farthest apart may exceed it. Only the ranks of `sets` that train have a
        trainer.
        """
        self._trainer = trainer
        self._sets = sets
        self._generator = generator
        self._rows_of_step = rows_of_step
        self._tolerance = tolerance
        self._exempt_share = exempt_share

    def rate(self, step: int) -> Rated:
        """Rate the step's rows with the trainer, before the switch. Collective over the world."""
        rows = self._rows_of_step(step)
        if self._sets is None or not self._sets.are_apart:
            return Rated(rows, self._scored(rows))
        own = None
        if self._sets.update.is_member:
            with self._sets.update.alone():
                own = self._scored(rows).view(torch.uint8)
        return Rated(rows, broadcast_ragged(own, self._sets.update.ranks[0]).view(torch.float32))

    def _scored(self, rows: Rows) -> Tensor:
        assert self._trainer is not None, "this rank doesn't train"
        tokens_T = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        packed = TokenRows(tokens_T, offsets_of([len(row) for row in rows]), torch.ones(len(rows), dtype=torch.int64))
        return self._trainer.score(packed, temperature=1.0).logprobs_R.cpu()

    def check(self, rated: Rated) -> float:
        """Return the largest difference of log-probs on any rank, after the switch. Collective over the world.

        Raises RuntimeError on every rank if it exceeds the tolerance, exempt tokens left out, or if the trainer's own
        log-probs aren't finite.
        """
        # A rank without an engine rates nothing, and agrees with itself.
        found = self._generator.score(rated.rows)
        found_R = torch.cat(found).cpu() if found else rated.logprobs_R
        distance_R = (found_R - rated.logprobs_R).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).sort().values
        num_exempt = int(self._exempt_share * len(distance_R)) if distance_R[-1].isfinite() else 0
        is_broken = (~rated.logprobs_R.isfinite().all()).to(distance_R)
        largest, judged, broken = max_over(torch.stack([*distance_R[[-1, -1 - num_exempt]], is_broken])).tolist()
        if broken:
            raise RuntimeError(
                f"the trainer's own log-probs aren't finite at policy version {self._generator.version}: its weights "
                "hold NaN or infinity, or are so large that they overflow. At version 0 the model's files do; later an "
                "update made them so: lower optim.lr or warm it up, and go on from an earlier checkpoint (resume=STEP)"
            )
        if judged > self._tolerance:
            of_others = f" and {judged:.3g} without the {num_exempt} farthest" if num_exempt else ""
            raise RuntimeError(
                f"reshard.probe_tokens: the log-probs that trainer and generator give {len(distance_R)} tokens at "
                f"policy version {self._generator.version} differ by up to {largest:.3g} nats{of_others}, but "
                f"reshard.probe_tolerance is {self._tolerance:g}; the generator computes with weights in wrong places, "
                "or otherwise than the trainer. Nothing was generated with these weights: restart from the last "
                "checkpoint, or raise reshard.probe_tolerance if the two engines are known to round so far apart"
            )
        return largest


def default_tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance of log-probs in nats if both sides compute in this dtype."""
    return _TOLERANCE_IN_FLOAT32 if dtype == torch.float32 else _TOLERANCE_IN_16_BITS


def exempt_share(dtype: torch.dtype, *, has_experts: bool) -> float:
    """Return the share of tokens that may exceed the tolerance by rounding in this dtype."""
    return _EXEMPT_OF_SPARSE_IN_16_BITS if has_experts and dtype != torch.float32 else 0.0


def probe_rows(prompts: Iterable[Sequence[int]], num_tokens: int, longest: int) -> list[list[int]]:
    """Return the first prompts, cut to `num_tokens` in all; each row has 2 to `longest` tokens.

    A prompt of one token, after which nothing could be rated, is repeated.
    """
    rows: list[list[int]] = []
    left = num_tokens
    for prompt in prompts:
        row = [*prompt, *prompt] if len(prompt) == 1 else list(prompt)
        rows.append(row[: min(left, longest)])
        left -= len(rows[-1])
        if left < 2:
            break
    return rows
