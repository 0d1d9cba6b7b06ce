"""The rows that a run trains on and evaluates, with the reward functions and the environment that read them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from spmdrl.config.config import Config
from spmdrl.dataflow.data.data_rows import RowNeeds, SourceRows, read_rows
from spmdrl.dataflow.data.records import BadRows, is_made
from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.environment_runner import EnvironmentFacts
from spmdrl.engines.environment.episode import Row
from spmdrl.engines.models.renderer import COLUMNS_OF_TEMPLATES
from spmdrl.engines.reward.functions import needs_answer
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.job.start.checked_run import ON_PAIRS, TRAINED, CheckedRun
from spmdrl.runtime.launch import read_launch_environment
from spmdrl.runtime.workers.call_pool import Unanswered


def with_rows(checked: CheckedRun) -> CheckedRun:
    """Read the rows to train on and to evaluate, unless prompts replace the latter. Raises ValueError."""
    config, verb, eval_rows = checked.config, checked.verb, checked.eval_rows
    # `generate` judges nothing, and `sft` only its evaluations.
    are_judged = verb in ("train", "eval") or (verb == "sft" and config.data.eval is not None)
    answers = are_judged and needs_answer(config.reward.functions)
    train_needs = RowNeeds(answer=answers and verb != "sft", completion=verb == "sft" or config.sft.trains)
    eval_needs = RowNeeds(answer=answers)
    if verb in ON_PAIRS:
        margin_key = config.reward_model.margin_key if verb == "reward-model" else None
        train_needs = eval_needs = RowNeeds(pair=True, margin_key=margin_key)
    train_rows = _train_rows(config, train_needs) if verb in TRAINED else []
    columns: Mapping[str, Sequence[str]] = {}
    facts = None
    if not eval_rows and verb == "generate" and config.data.eval is None:
        raise ValueError(
            "there is nothing to answer: set data.eval to a data file, or write prompt='...' (- is standard input)"
        )
    if not eval_rows and (config.data.eval is not None or verb == "eval"):
        if are_judged and not config.reward.functions:
            raise ValueError(
                f"data.eval is {config.data.eval}, but reward.functions is empty, and evaluations judge by functions "
                "alone; name one, such as math, or set data.eval to null"
            )
        eval_rows = read_rows(config.data.eval, config.data, needs=eval_needs, key="data.eval")
    if are_judged and read_launch_environment(os.environ).local_rank == 0:
        # Loads the functions in a child and ends it: a missing file or name is refused before the first rollout.
        with RewardPool(config.reward, 1) as pool:
            judged = train_rows if verb == "train" else []
            columns = pool.columns_taken()
            check_columns(columns, [*judged, *eval_rows])
    if config.environment.key is not None and (are_judged or verb == "generate"):
        facts = check_environment(config, [*train_rows, *eval_rows])
    return replace(checked, train_rows=train_rows, eval_rows=eval_rows, columns_taken=columns, environment=facts)


def _train_rows(config: Config, needs: RowNeeds) -> list[SourceRows]:
    """Read the rows of `data.train`; if none suits the verb, the error names verbs that accept them."""
    try:
        return read_rows(config.data.train, config.data, needs=needs)
    except BadRows as bad:
        others = {"preferences": RowNeeds(pair=True), "sft": RowNeeds(completion=True), "train": RowNeeds(answer=True)}
        found: dict[str, SourceRows] = {}
        for other in others if bad.has_all else ():
            with suppress(ValueError):
                found = found or {other: read_rows(config.data.train, config.data, needs=others[other])[0]}
        advice = [f"\n`spmdrl check {other}` takes these rows: {part.summary}" for other, part in found.items()]
        raise ValueError(f"{bad}{''.join(advice)}") from bad


def unread_columns(checked: CheckedRun) -> list[str]:
    """Return columns that neither prompt, answer nor reward functions read; none if that is unknown."""
    config = checked.config
    taken = {name.removesuffix("=") for names in checked.columns_taken.values() for name in names}
    if "**" in taken or config.environment.key is not None or config.teacher is not None:
        return []
    taken |= {*COLUMNS_OF_TEMPLATES, (checked.verb == "reward-model" and config.reward_model.margin_key) or ""}
    unread: dict[str, None] = {}
    for part in (*checked.train_rows, *checked.eval_rows):
        if (part.source.format or config.data.format) == "auto" and not is_made(part.source.path):
            # As in "prompt in 'reward_model.ground_truth'".
            keys = {name.split("'")[1] for name in part.found}
            read = taken | keys | {key.partition(".")[0] for key in keys} | {"answer"}
            read |= {"input"} if "instruction" in keys else set()
            unread |= dict.fromkeys(name for row in part.rows for name in row.columns if name not in read)
    return [*unread]


def check_columns(taken: Mapping[str, Sequence[str]], sources: Sequence[SourceRows]) -> None:
    """Refuse reward functions that need a column which no row of a source has. Raises ValueError."""
    for source in sources:
        # Every row has an `answer`, possibly None.
        there = {name for row in source.rows for name, value in row.columns.items() if value is not None}
        for function, columns in taken.items():
            lacking = [name for name in columns if name.isidentifier() and name not in there]
            if lacking:
                raise ValueError(
                    f"reward.functions: {function} needs the columns {', '.join(lacking)}, which no row of "
                    f"{source.source.path} has; its columns are {', '.join(sorted(there)) or 'none'}: rename one, or "
                    "give the parameter a default"
                )


def check_environment(config: Config, sources: Sequence[SourceRows]) -> EnvironmentFacts:
    """Build the environment in a child, open the first row's session on one rank, and end it; returns its facts.

    Raises ValueError if one can't be built or opened, or if no turn would end.
    """
    if config.rollout.ignore_eos:
        raise ValueError(f"{config.environment}, but rollout.ignore_eos lets no turn end; set it to false")
    first = next((row for source in sources for row in source.rows), None)
    with EnvironmentPool(config.environment, 1) as pool, suppress(Unanswered):
        # The ranks of a job would open as many containers as it has.
        if first is not None and read_launch_environment(os.environ).rank == 0:
            pool.try_open(Row(first.prompt, first.columns, config.seed))
    return pool.facts
