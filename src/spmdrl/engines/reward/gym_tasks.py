"""Tasks of reasoning-gym, each named by a URL, and their own scorers as a reward."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from spmdrl.observability.terminal.spelling import unknown
from spmdrl.runtime.installed import how_to_install

GYM_SCHEME = "reasoning_gym://"


def check_gym_installed(asked: str) -> None:
    """Raise ValueError if reasoning-gym isn't installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f"{asked} needs reasoning-gym; {how_to_install('reasoning-gym')}")


@lru_cache
def gym_task(url: str) -> Any:
    """Return the data set of a `reasoning_gym://` URL. Raises ValueError for unknown tasks, names and values."""
    from reasoning_gym.factory import DATASETS, create_dataset

    # `urlsplit` takes no scheme with an underscore.
    task, _, query = url.removeprefix(GYM_SCHEME).partition("?")
    if task not in DATASETS:
        raise ValueError(unknown("reasoning-gym has no task", task, sorted(DATASETS)))
    known = sorted(field.name for field in fields(DATASETS[task][1]))
    settings: dict[str, Any] = {"seed": 0}
    # A plus is an operator of many tasks here, not a space.
    for name, text in parse_qsl(query.replace("+", "%2B"), keep_blank_values=True):
        if name not in known:
            raise ValueError(unknown(f"{task} has no setting", name, known))
        try:
            settings[name] = json.loads(text)
        except ValueError:
            settings[name] = text
    try:
        return create_dataset(task, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{task} refuses these settings: {error}") from error


def score_of(task: Any, text: str, entry: dict[str, Any]) -> float:
    """Return the task's own score of an answer, from 0 to 1."""
    try:
        return float(task.score_answer(text, entry))
    except Exception:
        # Some scorers raise for an answer that they can't parse.
        return 0.0


def reasoning_gym(completions: Sequence[str], task: Sequence[str], entry: Sequence[dict[str, Any]]) -> list[float]:
    """Score what is in a response's last <answer> tags, or else the whole response."""
    from reasoning_gym.utils import extract_answer

    rows = zip(map(extract_answer, completions), completions, task, entry, strict=True)
    return [score_of(gym_task(url), text.strip() if tag is None else tag, made) for tag, text, url, made in rows]
