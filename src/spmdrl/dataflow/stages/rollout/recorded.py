"""The generation state over rollouts on disk, for `debug.rollouts_from` and `debug.rollouts_to`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.rollout.generation import GenerationStage
from spmdrl.dataflow.stages.rollout.requests import EndedResponses
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.generation.replay import ReplayEngine, record_rollouts, rollout_file
from spmdrl.engines.training.checkpoints.checkpoint import WRITE_FAILURES
from spmdrl.nouns.batch import WorkerState
from spmdrl.observability.outage import best_effort


class RecordedGeneration:
    """Generation that replays `source`'s records for each step's prompts, or records the responses in `target`.

    Each replica's first rank writes its part of a step. Collective: every rank calls it in each step, at least once.
    """

    state: ClassVar = WorkerState.GENERATION

    def __init__(self, generation: GenerationStage, *, source: Path | None, target: Path | None):
        self._replay: ReplayEngine | None = None
        if source is not None:
            self._replay = ReplayEngine(source, has_turns=generation.turns is not None)
            # Recorded responses have all turns.
            generation = replace(generation, engine=self._replay, turns=None)
        self._target = target if generation.mesh.is_leader else None
        if self._target is not None:
            generation = replace(generation, listeners=[*generation.listeners, self])
        self._generation = generation
        self._step = 0
        self._responses: list[Response] = []
        self._prompts: dict[int, tuple[int, ...]] = {}

    def __call__(self, samples: Samples) -> None:
        if self._replay is not None:
            self._replay.begin_step(samples.step)
        if samples.step != self._step:
            self._step = samples.step
            self._responses.clear()
            self._prompts.clear()
        self._generation(samples)
        if self._target is not None:
            path = rollout_file(self._target, samples.step, self._generation.mesh.rank)
            with best_effort(f"the rollouts of step {samples.step}", WRITE_FAILURES):
                record_rollouts(path, self._responses, self._prompts)

    def ended(self, ended: Sequence[EndedResponses]) -> None:
        """Keep responses until the next step."""
        for group in ended:
            prompt_ids = tuple(group.prompt.prompt_ids)
            self._responses += group.by_member.values()
            self._prompts |= {response.row: prompt_ids for response in group.by_member.values()}
