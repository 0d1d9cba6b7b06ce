"""Checks before ranks communicate and before a model is loaded, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from spmdrl.algorithms.table import build_algorithm
from spmdrl.config.config import Config
from spmdrl.config.reader import LoadedConfig, resolved_yaml, start_up
from spmdrl.dataflow.data.data_rows import rows_of_prompts
from spmdrl.job.rollouts.rollout import check_rollouts
from spmdrl.job.run.best_checkpoint import check_best
from spmdrl.job.start.checked_rows import with_rows
from spmdrl.job.start.checked_run import ON_PAIRS, TRAINED, CheckedRun, Verb, check_credit, check_judge, states_of
from spmdrl.job.start.model_checks import check_head_is_trained, checked_layout, with_own_layouts
from spmdrl.resources.layout import fit_update_layout
from spmdrl.runtime.launch import LaunchEnvironment, read_launch_environment
from spmdrl.runtime.screen import waiting


def _check_steps(checked: CheckedRun) -> None:
    if checked.offline is not None and not checked.offline.trains:
        key = f"{checked.section}.max_steps"
        raise ValueError(
            f"{key} is 0, so the {checked.verb} verb has nothing to do; set it to the number of steps, or "
            f"{checked.section}.epochs"
        )


def _with_correction(loaded: LoadedConfig[Config]) -> LoadedConfig[Config]:
    """Return the config with truncated importance sampling if responses come from earlier weights.

    Asynchronous runs need one (NeMo-RL requires it; AReaL's decoupled PPO, arXiv:2505.24298, is the same weight without
    a bound). An algorithm that compares with the generator already, or with whole pairs, takes none.
    """
    config = loaded.value
    if config.rollout.lag == 0 or loaded.origin.get("algo.rollout_is") != "default":
        return loaded
    try:
        algo = replace(config.algo, rollout_is="tis")
    except ValueError:
        return loaded
    origin = {**loaded.origin, "algo.rollout_is": "default with rollout.lag"}
    return replace(loaded, value=replace(config, algo=algo), origin=origin)


def _check_optimizer(checked: CheckedRun) -> None:
    if checked.config.lora is not None and checked.optim.name == "muon":
        raise ValueError(
            "optim.name is muon, but with lora only an adapter's two factors are trained, and orthogonal steps of each "
            "are none of their product; set it to adamw"
        )


Check = Callable[[CheckedRun], CheckedRun | None]
"""Raises ValueError if a run can't start; returns the run with the check's findings, if they are part of it."""

CHECKS: Sequence[tuple[Collection[str], Check]] = (
    (("reward-model",), check_head_is_trained),
    (("train",), check_rollouts),
    (("train",), check_judge),
    (("train",), check_credit),
    ((*TRAINED, "eval", "generate"), with_rows),
    (TRAINED, check_best),
    (("sft", *ON_PAIRS), _check_steps),
    (TRAINED, _check_optimizer),
    # A verb with only the policy ignores other layouts, so that it accepts the config of a training run.
    (("train", "preferences"), with_own_layouts),
)
"""verbs of each check, and the check"""
_OF_DATA = (with_rows, check_best)


def check_run(
    loaded: LoadedConfig[Config], verb: Verb, prompts: Sequence[str] = (), launch: LaunchEnvironment | None = None, *,
    reads_data: bool = True,
) -> CheckedRun:  # fmt: skip
    """Check layout, algorithm, data and reward functions. Raises ConfigError; no rank has communicated yet.

    `prompts` replace the rows of `data.eval`. `launch` is another job to check for, instead of this one. Data and
    rewards needn't be there unless it `reads_data`.
    """
    loaded = _with_correction(loaded)
    config, own = loaded.value, read_launch_environment(os.environ)
    with start_up(), waiting("checking settings and data", enabled=own.rank == 0):
        layout = checked_layout(config, verb, launch or own, is_here=launch is None)
        algorithm = build_algorithm(config.algo)
        checked = CheckedRun(
            verb, config, resolved_yaml(loaded), layout, algorithm, states_of(config, algorithm), [],
            [rows_of_prompts(prompts)] if prompts else [], config.model.path or "random weights (model.make)",
        )  # fmt: skip
        for verbs, check in CHECKS:
            if verb in verbs and (reads_data or check not in _OF_DATA):
                checked = check(checked) or checked
    return checked


def over_all_ranks(checked: CheckedRun, num_ranks: int) -> CheckedRun:
    """Return the run with its update layout over all ranks. Raises ValueError if it doesn't fit them."""
    return replace(checked, layout=fit_update_layout(checked.config.resources.update, num_ranks))
