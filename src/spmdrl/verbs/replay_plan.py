"""Start, settings and feasibility of repeating a run's step to the bit."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdrl.config.config import Config
from spmdrl.config.reader import ConfigError, LoadedConfig
from spmdrl.engines.training.checkpoints.manifest import damage, step_of_folder
from spmdrl.job.model.model_source import CHECKPOINTS, newest_sound_model
from spmdrl.job.rollouts.row_records import RowDigests, read_row_records
from spmdrl.job.run.outcome import WARM_START
from spmdrl.job.run.resuming import RUN_FILE, read_record, resolved_config_until
from spmdrl.nouns.settings.log_config import LogConfig
from spmdrl.observability.report.config_diff import RESOLVED_CONFIG
from spmdrl.observability.summary import read_summary
from spmdrl.resources.layout import GenerationLayout, RankSetsConfig, UpdateLayout

_UNTIL = re.compile(re.escape(resolved_config_until(0)).replace("000000", r"(\d+)"))


@dataclass(frozen=True)
class ReplayPlan:
    """Steps to repeat: from a checkpoint to the step whose rows are wanted."""

    run: Path
    step: int
    checkpoint: Path | None
    """None: the steps from the first one on"""
    first_step: int
    ranks: int
    """number of ranks of the run's job; 1 if it isn't recorded"""
    recorded: dict[int, RowDigests]
    """the run's records of the step, by row"""


def plan_replay(run: Path, step: int, checkpoint: Path | None) -> ReplayPlan:
    """Choose the newest sound checkpoint before the step, unless one is given.

    Raises ConfigError if there is none, or if steps of several ranks would have to be repeated.
    """
    if not (run / RESOLVED_CONFIG).is_file():
        raise ConfigError(f"{run} has no {RESOLVED_CONFIG}; name the folder of a run of the verb train")
    if step < 1:
        raise ConfigError(f"--step is {step}, but steps count from 1")
    recorded = read_row_records(run, step)
    ranks = next((one.ranks for one in recorded.values()), _ranks_of(run))
    before = {0: None} | _resumable(run)
    if checkpoint is not None:
        if (problem := damage(checkpoint, (RUN_FILE,))) is not None:
            raise ConfigError(f"--checkpoint is {checkpoint}, which can't be used: {problem}")
        before = {read_record(checkpoint).step: checkpoint}
    start = max((one for one in before if one < step), default=None)
    if start is None:
        raise ConfigError(f"--checkpoint is {checkpoint}, of step {min(before)}, which isn't before step {step}")
    if start + 1 < step and ranks > 1:
        able = sorted(one + 1 for one in before)
        nearest = sorted(sorted(able, key=lambda one: abs(one - step))[:2])
        raise ConfigError(
            f"step {step} can't be replayed to the bit: the newest checkpoint before it is of step {start}, and the "
            f"steps between were trained by {ranks} ranks, whose gradients one process sums in another order; steps "
            f"that can be: {', '.join(map(str, nearest))}; with checkpoint.interval=1 and checkpoint.keep_every all can"
        )
    return ReplayPlan(run, step, before[start], start + 1, ranks, recorded)


def config_of_step(run: Path, step: int) -> Path:
    """Return the file with a step's settings: earlier ones are kept under the step that they led to."""
    until = {int(found[1]): path for path in run.iterdir() if (found := _UNTIL.fullmatch(path.name))}
    return until[min(later)] if (later := [one for one in until if one >= step]) else run / RESOLVED_CONFIG


def replay_config(loaded: LoadedConfig[Config], plan: ReplayPlan, folder: Path) -> LoadedConfig[Config]:
    """Return the run's settings for one process that writes into `folder`, and neither evaluates nor saves.

    Raises ConfigError for settings that one process can't repeat.
    """
    config = loaded.value
    if config.train.epochs is None and plan.step > config.train.num_steps:
        raise ConfigError(f"--step is {plan.step}, but the run has {config.train.num_steps} steps")
    if plan.ranks > 1 and config.rollout.partial_max_rounds > 1:
        raise ConfigError(
            f"rollout.partial_max_rounds is {config.rollout.partial_max_rounds} and the run had {plan.ranks} ranks: "
            "which responses a step leaves to the next one depends on its replicas, so one process trains on other "
            "rows; runs of one rank can be replayed, and those with rollout.partial_max_rounds 1"
        )
    if config.rollout.lag:
        raise ConfigError(
            f"rollout.lag is {config.rollout.lag}: a step's responses come from weights of an earlier step than those "
            "that it trains, and a checkpoint holds only one of them; runs with rollout.lag 0 can be replayed"
        )
    whole: dict[str, Any] = {name: replace(section, layout=None) for name, section in config.beside.items()}
    of_reward = {"model": whole.pop("reward_model", None), "judge": whole.pop("judge", None)}
    made = _model_at_start(plan.run)
    value = replace(
        config,
        resources=replace(
            config.resources, update=UpdateLayout(), generation=GenerationLayout(), ranks=RankSetsConfig()
        ),
        reward=replace(config.reward, **of_reward),
        **whole,
        run=replace(config.run, dir=str(folder)),
        model=config.model if made is None else replace(config.model, path=str(made), make=None),
        sft=replace(config.sft, max_steps=0, epochs=None),
        data=replace(config.data, eval=None),
        eval=replace(config.eval, interval=0, before_train=False),
        checkpoint=replace(config.checkpoint, interval=0, keep_rollouts=False, best=None, keep_best=None),
        debug=replace(config.debug, rollouts_to=None),
        log=LogConfig(backends=("jsonl",), samples_per_step=0),
        resume=str(plan.checkpoint) if plan.checkpoint else "auto",
    )
    return replace(loaded, value=value, origin=defaultdict(lambda: "replay", loaded.origin))


def _model_at_start(run: Path) -> Path | None:
    """Return the model that the run made, or that its warm start left; None if it began with another folder's."""
    if (run / WARM_START).is_dir() and (model := newest_sound_model(run / WARM_START)) is not None:
        return Path(model)
    return run / "initial_model" if (run / "initial_model").is_dir() else None


def _resumable(run: Path) -> dict[int, Path | None]:
    """Return the checkpoints that training can resume from, by step."""
    found: dict[int, Path | None] = {}
    for folder in (run / CHECKPOINTS).glob("step_*"):
        step = step_of_folder(folder.name)
        if step is not None and damage(folder, (RUN_FILE,)) is None and read_record(folder).is_resumable:
            found[step] = folder
    return found


def _ranks_of(run: Path) -> int:
    """Return the number of ranks in the run's summary, such as `2 x cpu`."""
    number, _, _ = str(read_summary(run).get("devices", "")).partition(" ")
    return int(number) if number.isdecimal() else 1
