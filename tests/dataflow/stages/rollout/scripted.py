"""An engine whose turns are given, in place of a model that would write them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tests.support.chosen_device import chosen_device
from tests.support.tool_templates import renderer_of

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.rollout.turns import RolloutTurns, build_turns
from spmdrl.engines.environment.journal import Journal
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.resources.mesh import lone_generation_mesh

FILE = Path(__file__).with_name("environments.py")


class ScriptedEngine:
    """Answers each request of a row with the row's next turn."""

    version = 0

    def __init__(self, turns: dict[int, list[list[int]]], asked: list[tuple[int, ...]], choices: int):
        """`asked` gets each request's prompt; `choices` is the number of experts per token."""
        self._left = {row: iter(given) for row, given in turns.items()}
        self._waiting: list[tuple[int, tuple[int, ...]]] = []
        self._asked, self._choices = asked, choices

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += [(row, request.prompt_ids) for request in requests for row in request.rows]
        self._asked += [request.prompt_ids for request in requests]

    def step(self) -> list[Response]:
        rows, self._waiting = self._waiting, []
        return [Response(row, ids, (-1.0,) * len(ids), "stop", (0,) * len(ids), self._experts(*prompt_ids, *ids))
                for row, prompt_ids in rows for ids in [tuple(next(self._left[row]))]]  # fmt: skip

    def _experts(self, *ids: int) -> torch.Tensor | None:
        """Choices of all fed tokens, which are the tokens themselves."""
        return torch.tensor(ids[:-1]).short().repeat_interleave(self._choices) if self._choices else None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def abort(self) -> list[Response]:
        return []


def turns_of(
    config: EnvironmentConfig, renderer: Renderer, stack: ExitStack, journal: Journal | None = None
) -> RolloutTurns:
    turns = build_turns(
        config, lone_generation_mesh(), renderer, chosen_device(), stack, vocab_size=1 << 20, journal=journal
    )
    assert turns is not None
    return turns


def ended_row(
    environment: EnvironmentConfig | str, renderer: Renderer | str, prompt: Any, turns: Sequence[str],
    columns: dict[str, Any] | None = None, *, max_tokens: int = 1000, journal: Journal | None = None,
    asked: list[tuple[int, ...]] | None = None, choices: int = 0,
) -> tuple[Response, list[int]]:  # fmt: skip
    """A row's response to a prompt in which the model writes these turns, and the prompt's tokens.

    `asked` gets the prompts of the engine's requests.
    """
    config = environment
    if isinstance(config, str):
        config = EnvironmentConfig(f"{FILE}:{environment}", isolation="inline")
    renderer = renderer_of(renderer) if isinstance(renderer, str) else renderer
    columns = columns or {}
    prompt_ids = renderer.prompts([prompt], [columns]).prompt_ids(0)
    row = Prompt("0", prompt_ids, "", None, columns, prompt)
    script = [renderer.tokenizer.encode(text) for text in turns]
    with ExitStack() as stack:
        answers = turns_of(config, renderer, stack, journal).run(
            ScriptedEngine({0: script}, [] if asked is None else asked, choices),
            [Request((0,), prompt_ids, (7,), SamplingParams(max_tokens=max_tokens))],
            [row],
        )
        (by_request,) = answers
    return by_request[0][0], list(prompt_ids)
