"""An engine whose turns are given, in place of a model that would write them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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

    def __init__(self, turns: dict[int, list[list[int]]]):
        self._left = {row: iter(given) for row, given in turns.items()}
        self._waiting: list[int] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += [row for request in requests for row in request.rows]

    def step(self) -> list[Response]:
        rows, self._waiting = self._waiting, []
        return [Response(row, ids, (-1.0,) * len(ids), "stop", (0,) * len(ids)) for row in rows
                for ids in [tuple(next(self._left[row]))]]  # fmt: skip

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
) -> tuple[Response, list[int]]:  # fmt: skip
    """A row's response to a prompt in which the model writes these turns, and the prompt's tokens."""
    config = environment
    if isinstance(config, str):
        config = EnvironmentConfig(f"{FILE}:{environment}", isolation="inline")
    renderer = renderer_of(renderer) if isinstance(renderer, str) else renderer
    columns = columns or {}
    prompt_ids = renderer.prompts([prompt], [columns]).prompt_ids(0)
    asked = Prompt("0", prompt_ids, "", None, columns, prompt)
    script = [renderer.tokenizer.encode(text) for text in turns]
    with ExitStack() as stack:
        answers = turns_of(config, renderer, stack, journal).run(
            ScriptedEngine({0: script}),
            [Request((0,), prompt_ids, (7,), SamplingParams(max_tokens=max_tokens))],
            [asked],
        )
        (by_request,) = answers
    return by_request[0][0], list(prompt_ids)
