"""The generation state: prompts become responses, each passed on as soon as it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.rollout.portions import Portions
from spmdrl.dataflow.stages.rollout.requests import (
    EndedResponses,
    ResponseListener,
    StopPoint,
    Turns,
    columns_of,
    row_seed,
    run_rollout,
)
from spmdrl.dataflow.stages.rows import BEGINS_PIECE
from spmdrl.engines.generation.protocol import ENDS, AnsweringEngine, Request, Response
from spmdrl.nouns.batch import WorkerState
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.mesh import GenerationMesh


@dataclass(frozen=True)
class WholeGroup:
    """A prompt and its responses, all ended, in the order of their rows."""

    prompt: Prompt
    responses: Sequence[Response]


@dataclass(kw_only=True)
class GenerationStage:
    """State that runs this rank's engine on its replica's groups. Collective: every rank calls it once per step.

    The ranks of a replica get the same responses; the first of them acts for all.
    """

    state: ClassVar = WorkerState.GENERATION
    engine: AnsweringEngine
    mesh: GenerationMesh
    sampling: SamplingParams
    seed: int
    listeners: Sequence[ResponseListener]
    recorder: Recorder
    turns: Turns | None = None
    """lets an environment reply between turns"""
    portions: Portions | None = None
    """scores rows that have ended while others wait for the environment"""

    def __call__(self, samples: Samples) -> None:
        groups, size = self._dealt(samples), samples.group_size
        prompts = [samples.rows.prompt_of(group[0]) for group in groups]
        requests = [
            Request(group, tuple(prompt.prompt_ids), self._seeds(samples.step, group), self.sampling)
            for group, prompt in zip(groups, prompts, strict=True)
        ]
        self._open_portions(samples, len(groups) * size)
        answers: list[list[Response]] = [[] for _ in groups]
        stop = StopPoint(self.mesh)
        for ended in run_rollout(self.engine, requests, prompts, self.turns, stop, self.portions):
            if stop.is_reached:
                break
            self._notify(
                [
                    EndedResponses.of(groups[number][0] // size, prompts[number], size, responses)
                    for number, responses in ended.items()
                ]
            )
            whole = []
            for number, responses in ended.items():
                answers[number] += responses
                self._add_to_portion(responses)
                if len(answers[number]) == size:
                    in_order = sorted(answers[number], key=lambda response: response.row)
                    whole.append(WholeGroup(prompts[number], in_order))
                    self._count(sum(response.num_own_tokens for response in in_order))
            self._put(samples, whole)
        self._commit(samples)
        # The same on every rank; if a step generates more than once, its most uneven deal.
        self.recorder.maximum("generation/imbalance", samples.rows.generation_imbalance())

    def _dealt(self, samples: Samples) -> list[tuple[int, ...]]:
        """Claim this replica's groups of rows."""
        # If not all rows run at once, the longest ones begin first, so that few run alone at the end.
        rows, size = samples.rows.deal_generation(), samples.group_size
        groups = [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]
        return sorted(groups, key=lambda group: samples.rows.expected_length(group[0]), reverse=True)

    def _seeds(self, step: int, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(row_seed(self.seed, step, row) for row in rows)

    def _notify(self, ended: Sequence[EndedResponses]) -> None:
        """Pass ended responses to the listeners."""
        if self.mesh.is_leader and ended:
            for listener in self.listeners:
                listener.ended(ended)

    def _count(self, num_tokens: int) -> None:
        """Record the number of tokens that this step generated."""
        if self.mesh.is_leader:
            self.recorder.total("generation/tokens", num_tokens)

    def _open_portions(self, samples: Samples, num_rows: int) -> None:
        """Begin a step in which this rank's replica generates this many rows."""
        if self.portions is not None:
            self.portions.open(samples, num_rows)

    def _add_to_portion(self, responses: Sequence[Response]) -> None:
        """Let responses that will be trained on be scored."""
        if self.portions is not None:
            self.portions.add(responses)

    def _commit(self, samples: Samples) -> None:
        """End the state, after all portions but the last. Collective over all ranks.

        Raises StopAgreed on all of them if one was asked to stop.
        """
        for name, figures in self.turns.take_figures().items() if self.turns is not None else ():
            self.recorder.mean_of(f"environment/{name}", figures)
        if self.portions is not None:
            self.portions.close()
            self.recorder.total("fusion/hideable_seconds/generation", self.portions.hideable_seconds())
        samples.commit(self.state)

    def _put(self, samples: Samples, groups: Sequence[WholeGroup]) -> None:
        """Record these groups' statistics, and store them together, unless portions do."""
        if not self.mesh.is_leader or not groups:
            return
        responses = [response for group in groups for response in group.responses]
        if self.portions is None:
            samples.put(self.state, columns_of(responses))
        num_prompt_tokens = sum(len(group.prompt.prompt_ids) * len(group.responses) for group in groups)
        num_tokens = sum(len(response.token_ids) for response in responses)
        lengths = [response.num_own_tokens for response in responses]
        self.recorder.total("perf/tokens", num_prompt_tokens + num_tokens)
        self.recorder.mean_of("completions/mean_length", lengths)
        self.recorder.minimum("completions/min_length", min(lengths))
        self.recorder.maximum("completions/max_length", max(lengths))
        self.recorder.mean_of("completions/clipped_ratio", [response.finish == "length" for response in responses])
        if turns := [response.turns for response in responses if response.turns is not None]:
            self.recorder.mean_of("environment/turns", [max(own, default=0) for own in turns])
            self.recorder.mean_of("environment/pieces", [1 + own.count(BEGINS_PIECE) for own in turns])
            self.recorder.mean_of("environment/tokens", [sum(turn <= 0 for turn in own) for own in turns])
            ends = [response.end for response in responses]
            for end in ENDS:
                self.recorder.total(f"environment/ends/{end}", ends.count(end))
