"""Reward functions: loading, calling in the form that they were written for, and checking their results."""

from __future__ import annotations

import bdb
import importlib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from spmdrl.engines.reward.answers import RULES, check_rule_installed
from spmdrl.engines.reward.calls import FunctionScores, RewardCall
from spmdrl.engines.reward.code_reward import CodeReward, Judged
from spmdrl.engines.reward.formula import Undecided
from spmdrl.engines.reward.gym_tasks import check_gym_installed, reasoning_gym
from spmdrl.nouns.settings.reward_config import CODE, GYM, CodeConfig, function_names
from spmdrl.nouns.settings.role_configs import MAX_MAGNITUDE
from spmdrl.runtime.workers.loading import Loaded, explain, load_attribute
from spmdrl.runtime.workers.verdict import Verdict
from spmdrl.runtime.workers.worker import no_terminal

_RESERVED = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function and the form of its arguments.

    `rule` is built in; `trl` takes lists of all rows, `f(prompts, completions, completion_ids, **columns)`;
    `verl` takes one row, `compute_score(data_source, solution_str, ground_truth, extra_info)`.
    """

    name: str
    call: Callable[..., Any]
    form: Literal["rule", "trl", "verl"]

    def close(self) -> None:
        """Release the resources that the function holds."""
        if isinstance(self.call, CodeReward):
            self.call.close()


def needs_answer(specs: Iterable[str]) -> bool:
    """Return True if a built-in rule is among the functions: rules need an answer in every row."""
    return any(spec in RULES for spec in specs)


def load_functions(specs: Sequence[str], code: CodeConfig) -> list[RewardFunction]:
    """Load built-in functions, `pkg.mod:fn` or `file.py:fn`; raises ValueError if one can't be loaded."""
    return [_load(spec, name, code) for spec, name in zip(specs, function_names(specs), strict=True)]


def _load(spec: str, name: str, code: CodeConfig) -> RewardFunction:
    if spec in RULES:
        check_rule_installed(spec)
        return RewardFunction(name, RULES[spec], "rule")
    if spec == CODE:
        return RewardFunction(name, CodeReward(code), "rule")
    if spec == GYM:
        check_gym_installed(f"reward.functions: '{spec}'")
        # Imported before the first call, whose time is limited.
        importlib.import_module(spec)
        return RewardFunction(name, reasoning_gym, "trl")
    call = load_attribute(spec, "reward.functions", [*RULES, CODE, GYM], kind="function")
    return RewardFunction(name, call, _form(spec, call))


def load(specs: Sequence[str], settings: Mapping[str, Any]) -> Loaded:
    """Return a worker's message handler, and the columns that each function takes.

    `settings` configure the reward `code`. Raises ValueError if a function can't be loaded.
    """
    functions = load_functions(specs, CodeConfig(**settings))

    def answer(message: dict[str, Any]) -> list[dict[str, Any]]:
        call = RewardCall(**message)
        return [asdict(_score_without_terminal(function, call)) for function in functions]

    return Loaded(answer, columns_taken(functions))


def _score_without_terminal(function: RewardFunction, call: RewardCall) -> FunctionScores:
    try:
        return score(function, call)
    except BaseException as error:
        reason = no_terminal("a debugger", "reward") if isinstance(error, bdb.BdbQuit) else explain(error)
        return FunctionScores.failed(call.num_rows, Verdict.CRASHED, f"{function.name}: {reason}")


def columns_taken(functions: Sequence[RewardFunction]) -> dict[str, list[str]]:
    """Return each function's column parameters: `level` if required, `level=` if optional, `**` for any."""
    taken = {}
    for function in functions:
        names, takes_any = _parameters(function.call)
        if function.form == "verl":
            names = dict.fromkeys(("answer", "data_source", "extra_info"), False)
        columns = [f"{name}{'' if must else '='}" for name, must in names.items() if name not in _RESERVED]
        # The other built-in rules use the answer only.
        takes_any = takes_any and (function.form == "trl" or isinstance(function.call, CodeReward))
        taken[function.name] = [*columns, *(["**"] if takes_any else [])]
    return taken


def _form(spec: str, call: Callable[..., Any]) -> Literal["trl", "verl"]:
    names, takes_any = _parameters(call)
    if {"solution_str", "ground_truth"} <= set(names):
        return "verl"
    if "completions" in names or takes_any:
        return "trl"
    raise ValueError(
        f"reward.functions: '{spec}' takes ({', '.join(names)}), but a reward function takes completions and columns "
        "of the data (as in TRL), or data_source, solution_str, ground_truth, extra_info (as in verl)"
    )


def _parameters(call: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Return parameters by name -> whether required, and whether any further name is accepted."""
    parameters = inspect.signature(call).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {p.name: p.default is inspect.Parameter.empty for p in parameters if p.kind in by_name}
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def score(function: RewardFunction, call: RewardCall) -> FunctionScores:
    """Call one function on all rows and check its result; an exception becomes the verdict `CRASHED`."""
    if function.form == "verl":
        outcomes: Sequence[Any] = _call_rows(function.call, call)
    else:
        outcome = _finished([_attempt(function.call, lambda: _batch_arguments(function, call))])[0]
        if isinstance(outcome, BaseException):
            return FunctionScores.failed(call.num_rows, Verdict.CRASHED, f"{function.name}: {explain(outcome)}")
        listed = outcome.tolist() if hasattr(outcome, "tolist") else outcome
        rows = list(listed) if isinstance(listed, (list, tuple)) else None
        if rows is None or len(rows) != call.num_rows:
            got = f"a {type(outcome).__name__}" if rows is None else f"{len(rows)} values"
            error = f"{function.name} returned {got} for {call.num_rows} rows; return a list with one value per row"
            return FunctionScores.failed(call.num_rows, Verdict.MALFORMED, error)
        outcomes = rows
    return _checked(function.name, outcomes)


def _batch_arguments(function: RewardFunction, call: RewardCall) -> dict[str, Any]:
    columns = {name: values for name, values in call.columns.items() if name not in _RESERVED}
    completions: Sequence[Any] = call.completions
    if function.form == "trl":
        # TRL passes completions of conversational prompts as messages.
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(call.prompts, call.completions, strict=True)
        ]
    given = {"prompts": call.prompts, "completions": completions, "completion_ids": call.completion_ids, **columns}
    names, takes_any = _parameters(function.call)
    missing = [name for name, is_required in names.items() if is_required and name not in given]
    if missing:
        raise ValueError(f"it needs {missing}, but the rows have the columns {sorted(columns)}")
    return given if takes_any else {name: given[name] for name in names if name in given}


def _call_rows(function: Callable[..., Any], call: RewardCall) -> list[Any]:
    names, takes_any = _parameters(function)

    def arguments(row: int) -> dict[str, Any]:
        columns = {name: values[row] for name, values in call.columns.items()}
        given = {
            "data_source": columns.get("data_source"),
            "solution_str": call.completions[row],
            "ground_truth": columns.get("answer"),
            "extra_info": columns.get("extra_info"),
        }
        return given if takes_any else {name: value for name, value in given.items() if name in names}

    outcomes = _finished([_attempt(function, partial(arguments, row)) for row in range(call.num_rows)])
    return [value["score"] if isinstance(value, Mapping) and "score" in value else value for value in outcomes]


def _attempt(function: Callable[..., Any], arguments: Callable[[], dict[str, Any]]) -> Any:
    """Return the function's value or exception."""
    try:
        return function(**arguments())
    except (bdb.BdbQuit, KeyboardInterrupt):
        # Leaving the debugger inside a reward function, or Ctrl-C, ends the program, not the row.
        raise
    except BaseException as error:
        return error


def _finished(outcomes: list[Any]) -> list[Any]:
    """Return the outcomes, awaiting async functions together."""
    if not any(inspect.isawaitable(outcome) for outcome in outcomes):
        return outcomes
    # A sixth of the time in which a worker starts.
    import asyncio

    async def wait(outcome: Awaitable[Any]) -> Any:
        return await outcome if inspect.isawaitable(outcome) else outcome

    async def wait_for_all() -> list[Any]:
        return await asyncio.gather(*map(wait, outcomes), return_exceptions=True)

    return asyncio.run(wait_for_all())


def _checked(name: str, outcomes: Sequence[Any]) -> FunctionScores:
    values: list[float | None] = []
    verdicts: list[Verdict] = []
    error: str | None = None
    for row, outcome in enumerate(outcomes):
        value, verdict, problem = _checked_value(outcome)
        values.append(value)
        verdicts.append(verdict)
        error = error or (f"{name}, row {row}: {problem}" if problem else None)
    return FunctionScores(values, verdicts, error)


def _checked_value(outcome: Any) -> tuple[float | None, Verdict, str | None]:
    """Return a row's value, its verdict, and its error, if any."""
    if outcome is None:
        return None, Verdict.LEFT_OUT, None
    if isinstance(outcome, Judged):
        return outcome.value, outcome.verdict, None
    if isinstance(outcome, BaseException):
        return None, Verdict.TIMED_OUT if isinstance(outcome, Undecided) else Verdict.CRASHED, explain(outcome)
    if not isinstance(outcome, numbers.Real) and hasattr(outcome, "item") and getattr(outcome, "size", 1) != 0:
        outcome = _attempt(outcome.item, dict)
    if isinstance(outcome, Mapping) and "score" not in outcome:
        return None, Verdict.MALFORMED, f"it gave a dict without 'score'; keys: {', '.join(map(str, outcome)):.200}"
    if not isinstance(outcome, numbers.Real):
        return None, Verdict.MALFORMED, f"it gave a {type(outcome).__name__}, which isn't a number or None"
    try:
        value = float(outcome)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        return None, Verdict.MALFORMED, f"it gave {value}, which isn't finite"
    if abs(value) > MAX_MAGNITUDE:
        problem = f"it gave {value:g}, but a reward is at most {MAX_MAGNITUDE:g} in magnitude; scale it down"
        return None, Verdict.MALFORMED, problem
    return value, Verdict.WRONG if value == 0 else Verdict.SCORED, None
