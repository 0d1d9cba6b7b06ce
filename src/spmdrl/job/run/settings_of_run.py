"""Settings that a run's model answers with: `eval` and `generate` take them from the run that they are given."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from spmdrl.config.config import Config, load_config
from spmdrl.config.given import DEFAULT, inline, value_leaves, within
from spmdrl.config.reader import ConfigError, LoadedConfig
from spmdrl.engines.environment.environment_pool import EnvironmentConfig
from spmdrl.job.model.model_source import CHECKPOINTS
from spmdrl.job.run.config_changes import RESOLVED_CONFIG
from spmdrl.observability.logs.outage import warn
from spmdrl.observability.terminal.screen import show
from spmdrl.resources.startup.launch import read_launch_environment

# A template's file isn't among them: the run's models have it.
_TAKEN = {
    "data": ("chat_template", "chat_template_kwargs", "system_prompt"),
    "rollout": ("stop", "max_completion_length", "temperature"),
    "environment": tuple(entry.name for entry in fields(EnvironmentConfig)),
}


def with_settings_of_run(loaded: LoadedConfig[Config], *, samples: bool) -> LoadedConfig[Config]:
    """The config with what it leaves to defaults of template, stops, lengths and environment as the model's run had it.

    Unchanged for a model that is no run's. With `samples`, rollout.temperature becomes that of the run's evaluations.
    """
    config, run = loaded.value, _run_of(loaded.value.model.path)
    if run is None:
        return loaded
    try:
        theirs = load_config([run / RESOLVED_CONFIG], []).value
    except ConfigError as problem:
        warn(f"settings of {run} aren't taken: {problem}")
        return loaded
    is_greedy = not samples or config.eval.num_samples == 1
    rollout = replace(theirs.rollout, temperature=0.0 if is_greedy else theirs.eval.temperature)
    theirs = replace(theirs, rollout=rollout if samples else replace(rollout, temperature=config.rollout.temperature))
    taken: dict[str, Any] = {}
    for section, names in _TAKEN.items():
        values = {name: getattr(getattr(theirs, section), name) for name in names}
        free = {name: value for name, value in values.items() if _is_default(loaded, f"{section}.{name}")}
        own = getattr(config, section)
        if config.data.chat_template == "never" and section == "data":
            continue
        changed = {name: value for name, value in free.items() if getattr(own, name) != value}
        config = replace(config, **{section: replace(own, **changed)})
        taken |= {f"{section}.{name}": value for name, value in changed.items()}
    if taken and read_launch_environment(os.environ).rank == 0:
        listed = ", ".join(f"{key}={inline(value)}" for key, value in taken.items())
        show(f"config: from {run / RESOLVED_CONFIG}: {listed}", stream=sys.stderr)
    names = [key for key, _ in value_leaves(config)]
    theirs_too = {key: str(run / RESOLVED_CONFIG) for key in names if any(within(key, name) for name in taken)}
    return replace(loaded, value=config, origin={**loaded.origin, **theirs_too})


def _is_default(loaded: LoadedConfig[Config], key: str) -> bool:
    return all(origin == DEFAULT for name, origin in loaded.origin.items() if within(name, key))


def _run_of(model: str | None) -> Path | None:
    """The folder of the run that a model's path names: itself, or the one whose checkpoint it is."""
    path = Path(model or "").expanduser()
    folders = [path, *(above.parent for above in path.parents if above.name == CHECKPOINTS)]
    return next((folder for folder in folders if model and (folder / RESOLVED_CONFIG).is_file()), None)
