"""Generation settings of a run's model: `eval` and `generate` take them from its run."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from spmdrl.config.config import Config, load_config
from spmdrl.config.given import DEFAULT, inline, value_leaves, within
from spmdrl.config.reader import ConfigError, LoadedConfig, start_up
from spmdrl.job.model.model_source import CHECKPOINTS
from spmdrl.job.run.outcome import MESSAGES
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.observability.outage import warn
from spmdrl.observability.report.config_diff import RESOLVED_CONFIG
from spmdrl.observability.summary import read_summary
from spmdrl.runtime.launch import read_launch_environment
from spmdrl.runtime.screen import show

# A template's file isn't among them: the run's models have it.
_TAKEN = (
    "data.chat_template", "data.chat_template_kwargs", "data.system_prompt", "rollout.stop",
    "rollout.max_completion_length", *(f"environment.{entry.name}" for entry in fields(EnvironmentConfig)),
)  # fmt: skip


@start_up()
def with_settings_of_run(loaded: LoadedConfig[Config], verb: str) -> LoadedConfig[Config]:
    """Fill unset template, stops, lengths and environment in the config from the model's run.

    Unchanged for a model of no run, and for verbs that train. Texts are rendered like the run's prompts if those were
    all messages. For `generate`, rollout.temperature becomes that of the run's evaluations.
    """
    config, run = loaded.value, _run_of(loaded.value.model.path)
    if run is None or verb not in ("eval", "generate"):
        return loaded
    try:
        theirs = load_config([run / RESOLVED_CONFIG], []).value
    except ConfigError as problem:
        warn(f"settings of {run} aren't taken: {problem}")
        return loaded
    values = {key: getattr(getattr(theirs, section), name) for key in _TAKEN for section, name in [key.split(".")]}
    if theirs.data.chat_template == "auto" and read_summary(run).get(MESSAGES):
        values["data.chat_template"] = "always"
    if verb == "generate":
        values["rollout.temperature"] = 0.0 if config.eval.num_samples == 1 else theirs.eval.temperature
    taken: dict[str, Any] = {}
    for key, value in values.items():
        section, name = key.split(".")
        own, is_unread = getattr(config, section), section == "data" and config.data.chat_template == "never"
        is_default = all(origin == DEFAULT for name, origin in loaded.origin.items() if within(name, key))
        if is_default and getattr(own, name) != value and not is_unread:
            taken[key] = value
            config = replace(config, **{section: replace(own, **{name: value})})
    origin = {
        key: str(run) if any(within(key, name) for name in taken) else loaded.origin[key]
        for key, _ in value_leaves(config)
    }
    if taken and read_launch_environment(os.environ).rank == 0:
        listed = ", ".join(f"{key}={inline(value)}" for key, value in taken.items())
        show(f"config: from {run}: {listed}", stream=sys.stderr)
    return replace(loaded, value=config, origin=origin)


def _run_of(model: str | None) -> Path | None:
    """Return the run folder of a model's path, which is the folder itself or one of its checkpoints."""
    path = Path(model or "").expanduser()
    folders = [path, *(above.parent for above in path.parents if above.name == CHECKPOINTS)]
    return next((folder for folder in folders if model and (folder / RESOLVED_CONFIG).is_file()), None)
