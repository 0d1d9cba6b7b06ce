"""Asynchronous rewards: calls are submitted, scored in processes that can be killed, and collected."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spmdrl.engines.reward import functions
from spmdrl.engines.reward.calls import FunctionScores, RewardCall, RewardResult, combine, read_columns, read_scores
from spmdrl.engines.reward.functions import columns_taken, load_functions, score
from spmdrl.nouns.settings.reward_config import CODE, RewardConfig, function_names
from spmdrl.runtime.workers.call_pool import CallPool
from spmdrl.runtime.workers.call_queue import Call
from spmdrl.runtime.workers.isolation import runs_inline
from spmdrl.runtime.workers.process import PendingCall, WorkerSetup
from spmdrl.runtime.workers.strikes import Strikes
from spmdrl.runtime.workers.verdict import FAILURES, Verdict

FIRST_ROWS = 8
"""rows that all fail before the run is given up"""


@dataclass
class _ScoresOfCalls:
    """Reader of each function's scores in reward workers' messages; counts failures until a row succeeds."""

    num_functions: int
    num_failed: int = 0
    error: str | None = None
    has_scored: bool = False

    def read(self, answer: Any, call: PendingCall, seconds: float) -> list[FunctionScores] | None:
        scores = read_scores(answer, self.num_functions, call.num_rows)
        return None if scores is None else self.counted(scores)

    def failed(self, call: PendingCall, verdict: Verdict, error: str) -> list[FunctionScores]:
        return self.counted([FunctionScores.failed(call.num_rows, verdict, error)] * self.num_functions)

    def counted(self, scores: list[FunctionScores]) -> list[FunctionScores]:
        failed = next((part for part in scores if part.error and set(part.verdicts) <= FAILURES), None)
        self.has_scored |= failed is None
        if failed is not None:
            self.error, self.num_failed = self.error or failed.error, self.num_failed + len(failed.values)
        return scores


class RewardPool:
    """Pool of processes that score calls: `submit` returns at once, `collect` waits.

    The constructor loads the functions, in a child unless inline, and raises ValueError if one can't be loaded.
    Inline, `submit` computes the rewards itself and nothing can be killed. `close` leaves no process behind.
    """

    def __init__(self, config: RewardConfig, num_workers: int | None = None, strikes: Strikes | None = None):
        self.call_level = config.call_level
        self.names = function_names(config.functions)
        self._weights = config.function_weights
        # No process is needed without functions.
        is_inline = runs_inline(config.isolation) or not config.functions
        self._functions = load_functions(config.functions, config.code) if is_inline else None
        setup = WorkerSetup(
            section="reward",
            functions_key="reward.functions",
            variables_key="reward.variables",
            runner=functions.__name__,
            functions=config.functions,
            environment=config.variables,
            memory_limit_gib=config.memory_limit_gib,
            settings=asdict(config.code),
        )
        self._timeout_seconds = config.timeout_seconds
        self._seconds_per_row = config.code.row_seconds if CODE in config.functions else 0.0
        self._max_error_rate = config.max_error_rate
        self._answers = _ScoresOfCalls(len(config.functions))
        self._calls = CallPool(
            setup,
            self._answers,
            num_workers=num_workers or config.workers,
            timeout_seconds=config.timeout_seconds,
            inline=None if self._functions is None else self._score_inline,
            strikes=strikes,
        )

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, calls: Mapping[Hashable, RewardCall]) -> None:
        """Request the rewards of some calls, each under a key of the caller's."""
        self._calls.submit(
            [
                Call(
                    key,
                    _message_of(call),
                    call.num_rows,
                    self._timeout_seconds + call.num_rows * self._seconds_per_row,
                    call.subject,
                )  # fmt: skip
                for key, call in calls.items()
            ]
        )

    def collect(self, keys: Sequence[Hashable]) -> list[RewardResult]:
        """Wait for the results of these calls and remove them, in the order of `keys`.

        Waits at most the timeouts of calls before or with them in a worker's queue.
        """
        return [self._combined(key, scores) for key, scores in zip(keys, self._calls.collect(keys), strict=True)]

    def came_at(self, keys: Sequence[Hashable]) -> float:
        """Wait for the results of these calls; returns the `time.perf_counter` of the last one."""
        return self._calls.wait(keys) or 0.0

    def _combined(self, key: Hashable, scores: list[FunctionScores]) -> RewardResult:
        if not self.names:
            return RewardResult(key, scores[0].values, {}, scores[0].verdicts, None)
        return combine(key, dict(zip(self.names, scores, strict=True)), self._weights)

    def hopeless(self) -> str | None:
        """Return the first error if all rows so far, at least `FIRST_ROWS`, have failed and that isn't allowed."""
        answers = self._answers
        is_one = not answers.has_scored and answers.num_failed >= FIRST_ROWS and self._max_error_rate < 1
        return answers.error if is_one else None

    def columns_taken(self) -> dict[str, list[str]]:
        """Return each function's column parameters: `level`, `level=` with a default, `**` for all."""
        return read_columns(self._calls.facts) if self._functions is None else columns_taken(self._functions)

    def close(self) -> None:
        """End the reward processes and their children; uncollected results stay, calls are cancelled."""
        self._calls.close()
        for function in self._functions or ():
            function.close()

    def _score_inline(self, asked: Call) -> list[FunctionScores]:
        assert self._functions is not None
        call = RewardCall(**asked.message)
        if not self._functions:
            # Only a reward model rewards these rows.
            return [FunctionScores([0.0] * call.num_rows, [Verdict.SCORED] * call.num_rows)]
        return self._answers.counted([score(function, call) for function in self._functions])


def _message_of(call: RewardCall) -> dict[str, Any]:
    return {
        "prompts": list(call.prompts),
        "completions": list(call.completions),
        "completion_ids": [list(ids) for ids in call.completion_ids],
        "columns": {name: list(values) for name, values in call.columns.items()},
    }
