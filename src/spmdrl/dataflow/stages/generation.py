"""The generation state: prompts become responses, and each finished group goes on at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from spmdrl.dataflow.samples.dock import Samples
from spmdrl.dataflow.samples.prompts import Prompt
from spmdrl.dataflow.stages.rows import ROUTED_EXPERTS
from spmdrl.engines.generation.protocol import GenerationEngine, Request, Response, SamplingParams
from spmdrl.engines.generation.replay import record_rollouts, rollout_file
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.mesh import GenerationMesh
from spmdrl.types import Batch, WorkerState, offsets_of


@dataclass(frozen=True)
class FinishedGroup:
    """All responses to one prompt, in row order."""

    prompt: Prompt
    responses: tuple[Response, ...]


class GroupListener(Protocol):
    """Somebody who starts on a group as soon as its last response is there."""

    def begin(self, step: int, group: FinishedGroup) -> None: ...


class RolloutRecorder:
    """A listener that keeps a step's responses and writes this rank's part of them to disk at the step's end."""

    def __init__(self, folder: Path, rank: int):
        self.folder = folder
        self.rank = rank
        self._groups: list[FinishedGroup] = []

    def begin(self, step: int, group: FinishedGroup) -> None:
        self._groups.append(group)

    def write(self, step: int) -> None:
        """Write what was generated in this step, and forget it."""
        responses = [response for group in self._groups for response in group.responses]
        prompts = {response.row: group.prompt.prompt_ids for group in self._groups for response in group.responses}
        record_rollouts(rollout_file(self.folder, step, self.rank), responses, prompts)
        self._groups.clear()


def row_seed(seed: int, step: int, row: int) -> int:
    """The 63-bit sampling seed of a row: the same on any number of ranks, and after a resume."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generate_groups(
    engine: GenerationEngine, requests: Sequence[Request], prompts: Sequence[Prompt]
) -> Iterator[FinishedGroup]:
    """Run the engine over one request a prompt, and yield each group as its last response comes.

    Collective over the ranks that the engine computes with: those of a replica bring the same requests.
    """
    engine.submit(requests)
    request_of = {row: number for number, request in enumerate(requests) for row in request.rows}
    finished: list[dict[int, Response]] = [{} for _ in requests]
    while engine.has_work:
        for response in engine.step():
            number = request_of[response.row]
            finished[number][response.row] = response
            rows = requests[number].rows
            if len(finished[number]) == len(rows):
                yield FinishedGroup(prompts[number], tuple(finished[number][row] for row in rows))


class GenerationStage:
    """Runs this rank's engine over the groups dealt to its replica. Collective: every rank calls it once a step.

    The ranks of a replica get the same responses; the first of them speaks for all.
    """

    state = WorkerState.GENERATION

    def __init__(
        self, engine: GenerationEngine, mesh: GenerationMesh, sampling: SamplingParams, *, seed: int,
        listeners: Sequence[GroupListener], recorder: Recorder,
    ):  # fmt: skip
        self.engine = engine
        self.mesh = mesh
        self.sampling = sampling
        self.seed = seed
        self.listeners = listeners
        self.recorder = recorder

    def __call__(self, samples: Samples, prompts: Sequence[Prompt]) -> None:
        rows, size = samples.deal_generation(), samples.group_size
        groups = [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]
        own_prompts = [prompts[group[0] // size] for group in groups]
        requests = [
            self._request(samples.step, group, prompt) for group, prompt in zip(groups, own_prompts, strict=True)
        ]
        for group in generate_groups(self.engine, requests, own_prompts):
            if self.mesh.is_leader:
                self._hand_on(samples, group)
        samples.commit(self.state)

    def _hand_on(self, samples: Samples, group: FinishedGroup) -> None:
        samples.put(self.state, columns_of(group.responses))
        self._report(group)
        for listener in self.listeners:
            listener.begin(samples.step, group)

    def _request(self, step: int, group: tuple[int, ...], prompt: Prompt) -> Request:
        seeds = tuple(row_seed(self.seed, step, row) for row in group)
        return Request(rows=group, prompt_ids=tuple(prompt.prompt_ids), seeds=seeds, sampling=self.sampling)

    def _report(self, group: FinishedGroup) -> None:
        for response in group.responses:
            length = len(response.token_ids)
            self.recorder.total("generation/tokens", length)
            self.recorder.total("perf/tokens", len(group.prompt.prompt_ids) + length)
            self.recorder.mean("completions/mean_length", length)
            self.recorder.minimum("completions/min_length", length)
            self.recorder.maximum("completions/max_length", length)
            self.recorder.mean("completions/clipped_ratio", float(response.finish == "length"))


def columns_of(responses: Sequence[Response]) -> Batch:
    """The generation state's columns of finished responses."""
    batch = Batch.of_rows(response.row for response in responses)
    batch.put_lists("response_ids", [response.token_ids for response in responses], torch.int32)
    batch.put_lists("rollout_logprobs", [response.logprobs for response in responses], torch.float32)
    batch.put_lists("versions", [response.versions for response in responses], torch.int32)
    finished = [int(response.finish == "stop") for response in responses]
    batch.put_dense("finished", torch.tensor(finished, dtype=torch.int32))
    choices = [response.choices for response in responses if response.choices is not None]
    if choices:
        assert len(choices) == len(responses), f"{len(choices)} of {len(responses)} responses bring their experts"
        batch.put_ragged(ROUTED_EXPERTS, torch.cat(choices), offsets_of([part.numel() for part in choices]))
    return batch
