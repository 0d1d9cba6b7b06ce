"""What a worker process runs of rewards: it loads the functions, and scores calls with all of them."""

from __future__ import annotations

import bdb
from collections.abc import Callable, Sequence
from typing import Any

from spmdrl.engines.reward.calls import FunctionScores, RewardCall
from spmdrl.engines.reward.functions import RewardFunction, load_functions, required_columns, score
from spmdrl.engines.workers.verdict import Verdict
from spmdrl.engines.workers.worker import no_terminal


def load(specs: Sequence[str]) -> tuple[Callable[[dict[str, Any]], Any], dict[str, list[str]]]:
    """What answers a call's message, and the columns that each function can't do without.

    Raises ValueError where a function can't be loaded.
    """
    functions = load_functions(specs)

    def answer(message: dict[str, Any]) -> list[dict[str, Any]]:
        call = RewardCall(message["prompts"], message["completions"], message["completion_ids"], message["columns"])
        parts = [_score(function, call) for function in functions]
        return [{"values": part.values, "verdicts": part.verdicts, "error": part.error} for part in parts]

    return answer, required_columns(functions)


def _score(function: RewardFunction, call: RewardCall) -> FunctionScores:
    try:
        return score(function, call)
    except bdb.BdbQuit:
        error = f"{function.name}: {no_terminal('a debugger', 'reward')}"
        return FunctionScores.failed(call.num_rows, Verdict.CRASHED, error)
