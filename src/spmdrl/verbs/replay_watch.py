"""A hook in the stages of a training run, which observes some rows of one step.

Shape letters: `R` packed response tokens of a micro-batch.
"""

from __future__ import annotations

import math
import pdb  # noqa: T100 - the verb's option --pdb
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from spmdrl.config.reader import ConfigError
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.reward import reward_call
from spmdrl.dataflow.stages.rows import TURNS, ModelTokens
from spmdrl.dataflow.stages.stages import StageHook
from spmdrl.dataflow.stages.update import OLD_LOGPROBS, Learner
from spmdrl.dataflow.stages.update_report import PIECE, row_of
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.reward.functions import load_functions, score
from spmdrl.nouns.batch import TokenTerms
from spmdrl.nouns.roles import WorkerState
from spmdrl.nouns.settings.reward_config import RewardConfig
from spmdrl.observability.report.replay_section import ReplayedRow, ReplayedToken
from spmdrl.runtime.screen import show
from spmdrl.runtime.workers.verdict import Verdict

_COLUMNS = ("response_ids", "rollout_logprobs", "versions", "finished", "reward", "reward_parts", "reward_verdict")


class StepReplayed(Exception):
    """End of the loop: the step is done, and nothing after its update is needed."""


class ReplayWatch(StageHook):
    """Record of a step's results for some rows; ends it after its update by StepReplayed."""

    def __init__(
        self, step: int, rows: Sequence[int], tokenizer: ModelTokenizer, config: RewardConfig, *, stops: bool
    ):  # fmt: skip
        """`stops` enters the debugger at each stage of the rows."""
        self.found: list[ReplayedRow] = []
        self._step = step
        self._rows = rows
        self._tokenizer = tokenizer
        self._config = config
        self._stops = stops
        self._is_reached = False
        self._trained: dict[tuple[int, int], dict[str, list[float]]] = {}
        """by row and piece, values of ReplayedToken by name, per token of the model, in the first update with it"""

    def before(self, state: WorkerState, samples: Samples) -> None:
        self._is_reached = samples.step == self._step
        if not self._is_reached:
            return
        if state is WorkerState.GENERATION:
            if beyond := [row for row in self._rows if not 0 <= row < samples.rows.num_rows]:
                raise ConfigError(
                    f"--row is {beyond[0]}, but step {samples.step} has rows 0 to {samples.rows.num_rows - 1}"
                )
            if self._stops:
                stop(
                    f"the generation of rows {list(self._rows)}: `b spmdrl.engines.generation.native.native_engine."
                    "NativeEngine.step` and `c` stop at each step of the engine"
                )
        if state is WorkerState.ADVANTAGE and self._stops:
            for row in self._rows:
                self._stop_in_reward(samples, row)

    def _stop_in_reward(self, samples: Samples, row: int) -> None:
        """Call the reward functions for one row, in this process; the step uses the values of its own calls."""
        turns = {TURNS} & samples.rows.reads(WorkerState.UPDATE)
        batch = samples.read([row], {"response_ids", *turns})
        ids, turn_of = (
            tuple(batch.values(name).tolist()) if name in batch else None for name in ("response_ids", TURNS)
        )
        response = Response(row, ids or (), (), "stop", (), turns=turn_of)
        call = reward_call(samples.rows.prompt_of(row), [response], self._tokenizer.decode)
        for function in load_functions(self._config.functions, self._config.code):
            stop(f"the reward {function.name} of row {row}: `s` steps into it; p call")
            scores = score(function, call)
            show(f"{function.name}: {scores.values[0]} ({scores.verdicts[0].name.lower()})")
            function.close()

    def loss(self, learner: Learner, terms: TokenTerms, weighted_R: Tensor) -> None:
        if not self._is_reached:
            return
        piece_R, logprobs_R = terms.columns[PIECE], terms.logprobs_R
        row_R = row_of(piece_R)
        pieces = [(row, piece) for row in self._rows for piece in piece_R[row_R == row].unique().tolist()]
        pieces = [piece for piece in pieces if piece not in self._trained]
        if pieces and self._stops:
            rows = list(dict(pieces))
            # Called once more, for the debugger only.
            stop(f"the loss of rows {rows}: `s` steps into learner.loss; p terms.logprobs_R[row_R == {rows[0]}]")
            learner.loss(terms)
        # Without the column, they are those that the update computes first.
        ratio_R = (logprobs_R - terms.columns.get(OLD_LOGPROBS, logprobs_R)).exp()
        for piece in pieces:
            places = (piece_R == piece[1]).nonzero().squeeze(1)
            found = {"trainer": logprobs_R, "ratio": ratio_R, "loss": weighted_R}
            self._trained[piece] = {name: values_R[places].tolist() for name, values_R in found.items()}
            if logprobs_R.requires_grad:
                logprobs_R.register_hook(partial(self._keep_gradient, piece, places))

    def _keep_gradient(self, piece: tuple[int, int], places: Tensor, gradient_R: Tensor) -> None:
        self._trained[piece]["gradient"] = gradient_R[places].tolist()

    def _trained_of(self, row: int) -> dict[str, list[float]]:
        """Return the values of a row's tokens, those of all of its pieces; empty if it wasn't trained."""
        joined: dict[str, list[float]] = {}
        for piece in sorted(one for one in self._trained if one[0] == row):
            for name, values in self._trained[piece].items():
                joined.setdefault(name, []).extend(values)
        return joined

    def after(self, state: WorkerState, samples: Samples) -> None:
        if self._is_reached and state is WorkerState.UPDATE:
            self.found = [self._row(samples, row) for row in self._rows]
            raise StepReplayed

    def _row(self, samples: Samples, row: int) -> ReplayedRow:
        rows = samples.rows
        if row not in rows.to_train:
            raise ConfigError(f"row {row} isn't trained in step {samples.step}: a later step continues its group")
        prompt, is_trained, trained = rows.prompt_of(row), rows.is_trained(row), self._trained_of(row)
        names = {*_COLUMNS, *({TURNS} & rows.reads(WorkerState.UPDATE)), *(("advantages",) if is_trained else ())}
        batch = samples.read([row], names)
        ids, turns = batch.values("response_ids").tolist(), batch.values(TURNS).tolist() if TURNS in batch else None
        own, columns = ModelTokens.of(batch), {"generator": "rollout_logprobs", "advantage": "advantages"}
        numbers = {name: own.pick(batch.values(key)).tolist() for name, key in columns.items() if key in batch}
        left_out = (
            "" if trained else "the update left the row out: its advantage is 0, or only the critic is trained yet"
        )
        parts = zip(self._config.names, batch.values("reward_parts").tolist(), strict=True)
        first = row - row % samples.group_size
        group = range(first, first + samples.group_size)
        return ReplayedRow(
            step=samples.step,
            row=row,
            prompt=prompt.text,
            answer=prompt.answer,
            response=self._tokenizer.decode(ids),
            turns=turns,
            is_finished=bool(batch.dense("finished")[0]),
            versions=own.pick(batch.values("versions")).tolist(),
            reward=float(batch.dense("reward")[0]),
            verdict=Verdict(int(batch.dense("reward_verdict")[0])).name.lower(),
            parts={name: value for name, value in parts if not math.isnan(value)},
            group_rewards=dict(zip(group, samples.read(group, ["reward"]).dense("reward").tolist(), strict=True)),
            left_out=left_out if is_trained else "the step left the row out, which has no advantage",
            tokens=list(self._tokens(ids, turns, numbers | trained)),
        )

    def _tokens(
        self, ids: Sequence[int], turns: Sequence[int] | None, columns: dict[str, list[float]]
    ) -> Iterator[ReplayedToken]:
        """Yield each token, with the next of the numbers in `columns` if the model wrote it."""
        place = 0
        for token, turn in zip(ids, turns or [1] * len(ids), strict=True):
            numbers = {name: values[place] for name, values in columns.items()} if turn > 0 else {}
            yield ReplayedToken(token, self._tokenizer.decode([token]), **numbers)
            place += turn > 0


def stop(where: str) -> None:
    """Enter the debugger in the caller, before its next line."""
    show(f"--- before {where}")
    pdb.Pdb().set_trace(sys._getframe(1))
