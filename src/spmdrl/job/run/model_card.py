"""README.md of a model folder: what the hub reads of it, and where the model comes from."""

from __future__ import annotations

import time
from pathlib import Path

from spmdrl import __version__
from spmdrl.engines.models.hf.model_folder import is_hub_name
from spmdrl.job.start.start_checks import CheckedRun

CARD = "README.md"
_OFFLINE = {"sft": "supervised", "preferences": "preferences (DPO)", "reward-model": "reward model (pairs)"}


def model_card(checked: CheckedRun, step: int) -> str:
    """The card of the model after a step of a run; its licence is for the publisher to state."""
    config, base_model, phase = checked.config, checked.base_model, checked.phase
    task = "text-classification" if phase == "reward-model" else "text-generation"
    front = ["library_name: transformers", f"pipeline_tag: {task}", f"tags: [spmdrl, {phase}]"]
    # The hub refuses a base model that it can't look up.
    if is_hub_name(base_model) and not Path(base_model).exists():
        front.append(f"base_model: {base_model}")
    facts = {
        "base model": base_model,
        "training": _OFFLINE.get(phase, f"reinforcement learning, {phase}"),
        "steps": step,
        "training data": config.data.train,
        "rewards": "none"
        if checked.offline
        else ", ".join(filter(None, (*config.reward.functions, config.reward.model))),
        "seed": config.seed,
        "made with": f"spmdrl {__version__}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    lines = [f"| {name} | `{_plain(value)}` |" for name, value in facts.items()]
    head = ["---", *front, "---", "", f"# {_plain(config.run.folder.name)}", "", "| | |", "|---|---|"]
    return "\n".join([*head, *lines, "", "Licence: to be stated by whoever publishes this model."]) + "\n"


def _plain(value: object) -> str:
    """On one line, and inside of one cell of the table."""
    return " ".join(str(value).replace("|", "/").replace("`", "'").split())
