"""The stages of a training run, with a look at some rows of one step.

Shape letters: `R` packed response tokens of a micro-batch.
"""

from __future__ import annotations

import math
import pdb  # noqa: T100 - the verb's option --pdb
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spmdrl.config.reader import ConfigError
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.reward import reward_call
from spmdrl.dataflow.stages.rows import TURNS
from spmdrl.dataflow.stages.stages import Crediting, Stages
from spmdrl.dataflow.stages.update import OLD_LOGPROBS, Learner
from spmdrl.dataflow.stages.update_report import ROW
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.reward.functions import load_functions, score
from spmdrl.nouns.batch import LossScope, TokenLoss, TokenTerms
from spmdrl.nouns.roles import WorkerState
from spmdrl.nouns.settings.reward_config import RewardConfig
from spmdrl.runtime.screen import show
from spmdrl.runtime.workers.verdict import Verdict


class StepReplayed(Exception):
    """The step is done; nothing of the loop behind its update is needed."""


@dataclass
class TrainedTokens:
    """What an update found of the tokens that the model wrote in a row."""

    logprobs: list[float]
    ratios: list[float] | None
    """probability now / under the step's first weights; None where no column has the latter"""
    losses: list[float]
    """terms of the loss, weighted"""
    gradients: list[float] = field(default_factory=list)
    """of the loss by each token's log-prob"""


@dataclass(frozen=True)
class SeenRow:
    """All that a step made of one row; log-probs, advantages and losses of the tokens that the model wrote."""

    row: int
    prompt: str
    answer: str | None
    token_ids: list[int]
    turns: list[int] | None
    is_finished: bool
    logprobs: list[float]
    versions: list[int]
    reward: float
    verdict: str
    parts: dict[str, float]
    group_rewards: dict[int, float]
    """by row, those of the prompt's responses"""
    advantages: list[float] | None
    """None where the row was left out"""
    trained: TrainedTokens | None
    """None where the update left it out, as its advantage is 0"""


class WatchedLearner:
    """An algorithm whose loss is looked at where it comes to some rows, in the first update with each."""

    def __init__(self, learner: Learner, rows: Sequence[int], *, stops: bool):
        self._learner = learner
        self._rows = rows
        self._stops = stops
        self.trained: dict[int, TrainedTokens] = {}

    @property
    def unit_size(self) -> int:
        return self._learner.unit_size

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        return self._learner.columns_for_loss(num_updates)

    def token_weights(self, lengths_B: Tensor, scope: LossScope) -> Tensor:
        return self._learner.token_weights(lengths_B, scope)

    def needs_signal(self) -> bool:
        return self._learner.needs_signal()

    def loss(self, terms: TokenTerms) -> TokenLoss:
        row_R = terms.columns[ROW]
        rows = [row for row in self._rows if row not in self.trained and bool((row_R == row).any())]
        learner = self._learner
        if rows and self._stops:
            stop(f"the loss of rows {rows}: `s` steps into learner.loss; p terms.logprobs_R[row_R == {rows[0]}]")
        loss = learner.loss(terms)
        for row in rows:
            self._keep(row, terms, loss, (row_R == row).nonzero().squeeze(1))
        return loss

    def _keep(self, row: int, terms: TokenTerms, loss: TokenLoss, places: Tensor) -> None:
        old_R, logprobs_R = terms.columns.get(OLD_LOGPROBS), terms.logprobs_R
        ratios = None if old_R is None else (logprobs_R - old_R).exp()[places].tolist()
        weighted_R = loss.loss_R * terms.columns["weights"]
        self.trained[row] = kept = TrainedTokens(logprobs_R[places].tolist(), ratios, weighted_R[places].tolist())

        def note(gradient_R: Tensor) -> None:
            kept.gradients = gradient_R[places].tolist()

        if logprobs_R.requires_grad:
            logprobs_R.register_hook(note)


class WatchedStages(Stages):
    """The stages of a run, which end one step, after its update, by StepReplayed."""

    def __init__(
        self, stages: Stages, step: int, rows: Sequence[int], *, tokenizer: ModelTokenizer, config: RewardConfig,
        record: Callable[[Samples], None], stops: bool,
    ):  # fmt: skip
        """`record` writes the digests of the step's rows; `stops` enters the debugger at each stage of the rows."""
        vars(self).update(vars(stages))
        self.seen: list[SeenRow] = []
        self._step = step
        self._rows = rows
        self._tokenizer = tokenizer
        self._config = config
        self._record = record
        self._stops = stops

    def generate(self, samples: Samples) -> None:
        if samples.step == self._step:
            beyond = [row for row in self._rows if not 0 <= row < samples.num_rows]
            if beyond:
                raise ConfigError(f"--row is {beyond[0]}, but step {samples.step} has rows 0 to {samples.num_rows - 1}")
            if self._stops:
                stop(
                    f"the generation of rows {list(self._rows)}: `b spmdrl.engines.generation.native.native_engine."
                    "NativeEngine.step` and `c` stop at each step of the engine"
                )
        super().generate(samples)

    def credit(self, samples: Samples, credit: Crediting) -> Mapping[str, float]:
        if samples.step == self._step and self._stops:
            for row in self._rows:
                self._stop_in_reward(samples, row)
        return super().credit(samples, credit)

    def _stop_in_reward(self, samples: Samples, row: int) -> None:
        """Call the reward functions for one row, in this process; the step has the values of its own calls."""
        ids, _ = self._tokens(samples, row)
        turns = self._turns(samples, row)
        response = Response(row, tuple(ids), (), "stop", (), turns=None if turns is None else tuple(turns))
        call = reward_call(samples.prompt_of(row), [response], self._tokenizer.decode)
        for function in load_functions(self._config.functions, self._config.code):
            stop(f"the reward {function.name} of row {row}: `s` steps into it; p call")
            scores = score(function, call)
            show(f"{function.name}: {scores.values[0]} ({scores.verdicts[0].name.lower()})")
            function.close()

    def update(self, samples: Samples, learner: Learner) -> None:
        if samples.step != self._step:
            return super().update(samples, learner)
        watched = WatchedLearner(learner, self._rows, stops=self._stops)
        super().update(samples, watched)
        self._record(samples)
        self.seen = [self._seen(samples, row, watched.trained.get(row)) for row in self._rows]
        raise StepReplayed

    def _seen(self, samples: Samples, row: int, trained: TrainedTokens | None) -> SeenRow:
        prompt = samples.prompt_of(row)
        if row not in samples.rows_of_step:
            raise ConfigError(f"row {row} isn't trained in step {samples.step}: a later step goes on with its group")
        names = ("rollout_logprobs", "versions", "finished", "reward", "reward_parts", "reward_verdict")
        batch = samples.read([row], names)
        ids, is_own = self._tokens(samples, row)
        advantages = None
        if samples.is_trained(row):
            advantages = _own(samples.read([row], ["advantages"]).to_lists("advantages")[0], is_own)
        first = row - row % samples.group_size
        group = list(range(first, first + samples.group_size))
        parts = zip(self._config.names, batch.to_lists("reward_parts")[0], strict=True)
        return SeenRow(
            row=row,
            prompt=prompt.text,
            answer=prompt.answer,
            token_ids=ids,
            turns=self._turns(samples, row),
            is_finished=bool(batch.dense("finished")[0]),
            logprobs=_own(batch.to_lists("rollout_logprobs")[0], is_own),
            versions=[int(one) for one in _own(batch.to_lists("versions")[0], is_own)],
            reward=float(batch.dense("reward")[0]),
            verdict=Verdict(int(batch.dense("reward_verdict")[0])).name.lower(),
            parts={name: value for name, value in parts if not math.isnan(value)},
            group_rewards=dict(zip(group, samples.read(group, ["reward"]).dense("reward").tolist(), strict=True)),
            advantages=advantages,
            trained=trained,
        )

    def _tokens(self, samples: Samples, row: int) -> tuple[list[int], list[bool]]:
        """The row's tokens, and which of them the model wrote."""
        ids = [int(one) for one in samples.read([row], ["response_ids"]).to_lists("response_ids")[0]]
        turns = self._turns(samples, row)
        return ids, [True] * len(ids) if turns is None else [turn > 0 for turn in turns]

    @staticmethod
    def _turns(samples: Samples, row: int) -> list[int] | None:
        if TURNS not in samples.reads(WorkerState.UPDATE):
            return None
        return [int(one) for one in samples.read([row], [TURNS]).to_lists(TURNS)[0]]


def _own(values: Sequence[float], is_own: Sequence[bool]) -> list[float]:
    """The values of the tokens that the model wrote."""
    return [value for value, own in zip(values, is_own, strict=True) if own]


def stop(where: str) -> None:
    """Enter the debugger in the caller, before its next line."""
    show(f"--- before {where}")
    pdb.Pdb().set_trace(sys._getframe(1))
