"""Rewards while other work goes on: calls are submitted, scored in processes that can be killed, and collected."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from spmdrl.engines.reward import functions
from spmdrl.engines.reward.calls import (
    FunctionScores,
    RewardCall,
    RewardResult,
    combine,
    function_names,
    read_columns,
    read_scores,
)
from spmdrl.engines.reward.code_config import CODE, CodeConfig
from spmdrl.engines.reward.functions import columns_taken, load_functions, score
from spmdrl.engines.reward.judge_config import JUDGE_PART, JudgeConfig
from spmdrl.engines.workers.call_pool import CallPool, Isolation, is_debugged, runs_inline
from spmdrl.engines.workers.call_queue import Call
from spmdrl.engines.workers.process import PendingCall, WorkerSetup
from spmdrl.engines.workers.strikes import Strikes
from spmdrl.engines.workers.verdict import FAILURES, Verdict

CallLevel = Literal["response", "group"]
MODEL_PART = "model"
"""the name of a reward model's part of the reward"""
FIRST_ROWS = 8
"""so many failures, without a row that has a reward, leave no hope for the others"""


@dataclass(frozen=True)
class RewardConfig:
    """How rewards are computed."""

    functions: tuple[str, ...] = ("math",)
    """reward functions: exact (the same text), number (plain numbers), choice (letters), math (math-verify), code (runs
    the program in a response against the row's tests), pkg.mod:fn or file.py:fn"""
    weights: tuple[float, ...] | None = None
    """weights of the functions in the sum that is the reward; null: 1 each"""
    model: str | None = None
    """reward model whose score of a whole response is one more part of the reward, named model: folder of a Hugging
    Face model for sequence classification with one label or of a run of the verb reward-model, or a hub name; its
    tokenizer must have the policy's tokens; reward.functions may be [] beside it; null: none"""
    model_weight: float = 1.0
    """weight of its score in the sum"""
    code: CodeConfig = field(default_factory=CodeConfig)
    """how the reward code runs programs"""
    special_tokens: Literal["keep", "skip"] = "keep"
    """special tokens in the text of a response, for functions, judges, environments and records: keep them, such as
    <think> where it is one, or skip them; stop tokens and padding are never part of it"""
    judge: JudgeConfig | None = None
    """a frozen language model that judges responses, beside the functions; null: none"""
    call_level: CallLevel = "response"
    """response: responses are scored as they finish, those of one prompt that finish in one engine step in one call;
    group: one call per prompt with all its responses, once the last has finished, for functions that compare them"""
    timeout_seconds: Annotated[float, Interval(gt=0, lt=math.inf)] = 15.0
    """a call that takes longer is killed, and its rows have no reward; the reward code has reward.code.row_seconds
    besides, for each row"""
    max_error_rate: Annotated[float, Interval(ge=0, le=1)] = 0.05
    """the run stops where more than this share of a step's rows couldn't be scored"""
    workers: Annotated[int, Ge(1)] = 1
    """reward processes per rank"""
    isolation: Isolation = "auto"
    """process: in child processes, which can be killed; inline: in the training process; auto: inline under pdb, else
    process"""
    memory_limit_gib: Annotated[float, Interval(gt=0, lt=math.inf)] | None = 4.0
    """memory in GiB that a reward process and all that it starts may hold, shared memory included; null: no limit"""
    environment: tuple[str, ...] = ()
    """environment variables passed to reward processes beside the common ones, such as the key of a judge's service"""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError(
                "reward.functions is empty, and there is no reward.model or reward.judge; name at least one function, "
                "such as math"
            )
        if self.model is not None and not self.model.strip():
            raise ValueError("reward.model is empty; give a model folder or hub name")
        if self.model is not None and MODEL_PART in function_names(self.functions):
            raise ValueError(
                f"reward.functions has one named {MODEL_PART}, as the part of the reward that reward.model gives; "
                "rename the function"
            )
        if not math.isfinite(self.model_weight):
            raise ValueError(f"reward.model_weight is {self.model_weight}, but it must be finite")
        if self.model is None and self.model_weight != 1:
            raise ValueError(
                f"reward.model_weight is {self.model_weight:g}, but there is no reward.model; set it, or leave the "
                "weight out"
            )
        if len(set(self.functions)) != len(self.functions):
            raise ValueError(f"reward.functions {list(self.functions)} names a function twice; use reward.weights")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} values, but reward.functions has {len(self.functions)}; "
                "give one weight per function, or leave reward.weights out"
            )
        if self.weights is not None and not all(map(math.isfinite, self.weights)):
            raise ValueError(f"reward.weights is {list(self.weights)}, but every weight must be finite")
        if self.judge is not None and JUDGE_PART in function_names(self.functions):
            raise ValueError(
                f"reward.functions has one named {JUDGE_PART}, as the part of the reward that reward.judge gives; "
                "rename the function"
            )
        if self.isolation == "inline" and "math" in self.functions and not is_debugged():
            raise ValueError(
                "reward.isolation is inline, but the reward math needs a process that can be killed (simplifying a "
                "formula may have no end); set reward.isolation to auto, which is inline under pdb"
            )

    @property
    def parts_beside(self) -> dict[str, float]:
        """The parts of the reward that no function gives, with their weights."""
        of_model = {} if self.model is None else {MODEL_PART: self.model_weight}
        return of_model if self.judge is None else of_model | {JUDGE_PART: self.judge.weight}

    @property
    def function_weights(self) -> tuple[float, ...]:
        """The weight of each function."""
        return self.weights or (1.0,) * len(self.functions)

    @property
    def part_weights(self) -> tuple[float, ...]:
        """The weight of each part of the reward."""
        return (*self.function_weights, *self.parts_beside.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the reward's parts, the functions first."""
        return (*function_names(self.functions), *self.parts_beside)


@dataclass
class _ScoresOfCalls:
    """The answers of reward calls, the scores of each function, counted while all of them fail."""

    num_functions: int
    num_failed: int = 0
    error: str | None = None
    has_scored: bool = False

    def read(self, answer: Any, call: PendingCall) -> list[FunctionScores] | None:
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
    """Scores calls asynchronously: `submit` returns at once, `collect` waits.

    The constructor loads the functions, in a child unless inline, and raises ValueError if one can't be loaded.
    Inline, `submit` computes the rewards itself and nothing can be killed. `close` leaves no process behind.
    """

    def __init__(self, config: RewardConfig, num_workers: int | None = None, strikes: Strikes | None = None):
        self.call_level = config.call_level
        self.names = function_names(config.functions)
        self._weights = config.function_weights
        # No process is needed to call nothing.
        is_inline = runs_inline(config.isolation) or not config.functions
        self._functions = load_functions(config.functions, config.code) if is_inline else None
        setup = WorkerSetup(
            section="reward",
            functions_key="reward.functions",
            variables_key="reward.environment",
            runner=functions.__name__,
            functions=config.functions,
            environment=config.environment,
            memory_limit_gib=config.memory_limit_gib,
            settings=asdict(config.code),
        )
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
        """Ask for the rewards of some calls, each under a key of the caller's."""
        self._calls.submit(
            [
                Call(key, _message_of(call), call.num_rows, call.num_rows * self._seconds_per_row, call.subject)
                for key, call in calls.items()
            ]
        )

    def collect(self, keys: Sequence[Hashable]) -> list[RewardResult]:
        """Wait for the results of these calls and take them out, in the order of `keys`.

        Waits at most the time of each call that is before them or with them in a worker's queue.
        """
        return [self._combined(key, scores) for key, scores in zip(keys, self._calls.collect(keys), strict=True)]

    def came_at(self, keys: Sequence[Hashable]) -> float:
        """Wait for the results of these calls; returns the `time.perf_counter` at which the last of them came."""
        return self._calls.wait(keys) or 0.0

    def _combined(self, key: Hashable, scores: list[FunctionScores]) -> RewardResult:
        if not self.names:
            return RewardResult(key, scores[0].values, {}, scores[0].verdicts, None)
        return combine(key, dict(zip(self.names, scores, strict=True)), self._weights)

    def hopeless(self) -> str | None:
        """The first error, where all rows so far have failed, `FIRST_ROWS` of them or more, and that isn't allowed."""
        answers = self._answers
        is_one = not answers.has_scored and answers.num_failed >= FIRST_ROWS and self._max_error_rate < 1
        return answers.error if is_one else None

    def columns_taken(self) -> dict[str, list[str]]:
        """By function, its parameters for columns of the data: `level`, `level=` with a default, `**` for all."""
        return read_columns(self._calls.facts) if self._functions is None else columns_taken(self._functions)

    def close(self) -> None:
        """End the reward processes with all that they started; results not yet collected stay, calls are given up."""
        self._calls.close()
        for function in self._functions or ():
            function.close()

    def _score_inline(self, message: dict[str, Any]) -> list[FunctionScores]:
        assert self._functions is not None
        call = RewardCall(**message)
        if not self._functions:
            # A reward model alone rewards these rows.
            return [FunctionScores([0.0] * call.num_rows, [Verdict.SCORED] * call.num_rows)]
        return self._answers.counted([score(function, call) for function in self._functions])


def _message_of(call: RewardCall) -> dict[str, Any]:
    return {
        "prompts": list(call.prompts),
        "completions": list(call.completions),
        "completion_ids": [list(ids) for ids in call.completion_ids],
        "columns": {name: list(values) for name, values in call.columns.items()},
    }
