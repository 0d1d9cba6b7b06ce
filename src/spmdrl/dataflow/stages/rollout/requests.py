"""Runs of requests through an engine, their responses as they end, and these responses' columns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.rows import ROUTED_EXPERTS, TURN_REWARDS, TURNS
from spmdrl.engines.generation.protocol import AnsweringEngine, Request, Response
from spmdrl.nouns.batch import Batch, offsets_of
from spmdrl.resources.mesh import GenerationMesh
from spmdrl.runtime.supervision.activity import activity, first_few
from spmdrl.runtime.supervision.stop_request import stop_reason

# Engine steps between agreements, if several ranks compute with it.
_STEPS_PER_AGREEMENT = 32

Ended = Mapping[int, list[Response]]
"""Responses that ended in one engine step, by their requests' numbers."""

Answers = Iterator[Ended]
"""Ended responses of each engine step that ended any."""


Came = Callable[[float | None], float | None]
"""Waits at most this many seconds (None: to the end); returns the `time.perf_counter` of completion, or None."""


class Meanwhile(Protocol):
    """Work during an environment's steps. All ranks of a replica make the same calls."""

    def between_steps(self) -> None:
        """Called between two steps of the engine."""
        ...

    def until(self, came: Came | None) -> None:
        """Called if nothing can be generated; returns once `came`. None on ranks that can't check it."""
        ...


class Turns(Protocol):
    """Replies of an environment between the turns of a row."""

    def run(
        self, engine: AnsweringEngine, requests: Sequence[Request], prompts: Sequence[Prompt],
        is_enough: Callable[[], bool] | None = None, meanwhile: Meanwhile | None = None,
    ) -> Answers: ...  # fmt: skip

    def take_figures(self) -> Mapping[str, Sequence[float]]: ...


class StopPoint:
    """Early end of a rollout if a rank of its engine was asked to stop; the same on all of them."""

    def __init__(self, mesh: GenerationMesh, is_hopeless: Callable[[], object] = bool):
        """`is_hopeless`, a test of this rank's work, ends the rollout as well."""
        self._is_hopeless = is_hopeless
        self._axes = [axis for axis in (mesh.tensor, mesh.expert) if axis.size > 1]
        self._num_steps = 0
        self.is_reached = False

    def __call__(self) -> bool:
        """Look before each step of the engine. Every 32nd call is collective over the ranks of the engine."""
        if self.is_reached:
            return True
        self._num_steps += 1
        if not self._axes:
            self.is_reached = self._is_asked()
        elif self._num_steps % _STEPS_PER_AGREEMENT == 0:
            asked = torch.tensor(int(self._is_asked()))
            for axis in self._axes:
                asked = axis.max(asked)
            self.is_reached = bool(asked)
        return self.is_reached

    def _is_asked(self) -> bool:
        return stop_reason() is not None or bool(self._is_hopeless())


def run_rollout(
    engine: AnsweringEngine, requests: Sequence[Request], prompts: Sequence[Prompt], turns: Turns | None,
    is_enough: Callable[[], bool] | None = None, meanwhile: Meanwhile | None = None,
) -> Answers:  # fmt: skip
    """Run the requests, each with its prompt, in one turn or, with `turns`, in several; see `run_requests`.

    `meanwhile` works while all rows wait for the environment.
    """
    if turns is None:
        return run_requests(engine, requests, is_enough)
    return turns.run(engine, requests, prompts, is_enough, meanwhile)


def run_requests(
    engine: AnsweringEngine, requests: Sequence[Request], is_enough: Callable[[], bool] | None = None
) -> Answers:
    """Run the engine until all rows have ended, or until `is_enough()` is true before one of its steps.

    Unfinished rows are then aborted, and come with their tokens so far. Collective over the ranks of the engine: the
    ranks of a replica pass the same requests.
    """
    engine.submit(requests)
    request_of = {row: number for number, request in enumerate(requests) for row in request.rows}
    open_rows = set(request_of)
    activity.rows = lambda: f"rows {first_few(sorted(map(str, open_rows.copy()), key=int))} not ended"
    while engine.has_work and not (is_enough is not None and is_enough()):
        ended = engine.step()
        activity.advance("engine steps")
        if ended:
            open_rows.difference_update(response.row for response in ended)
            yield by_request(ended, request_of)
    if engine.has_work and (aborted := engine.abort()):
        yield by_request(aborted, request_of)


def by_request(responses: Iterable[Response], request_of: Mapping[int, int]) -> Ended:
    """Group the responses by request."""
    together: dict[int, list[Response]] = {}
    for response in responses:
        number = request_of[response.row]
        # Removed and put last: a request is placed by its last response, so that groups complete in that order.
        own = together.pop(number, [])
        own.append(response)
        together[number] = own
    return together


def row_seed(seed: int, step: int, row: int) -> int:
    """Return the 63-bit sampling seed of a row: the same on any number of ranks, and after a resume."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class EndedResponses:
    """Ended responses to one prompt, by their places in its group."""

    group: Hashable
    """the same for all responses to this prompt, and unique to its group"""
    prompt: Prompt
    group_size: int
    by_member: Mapping[int, Response]

    @classmethod
    def of(cls, group: Hashable, prompt: Prompt, group_size: int, responses: Iterable[Response]) -> EndedResponses:
        """Build from a group whose rows are consecutive, the first a multiple of `group_size`."""
        return cls(group, prompt, group_size, {response.row % group_size: response for response in responses})


class ResponseListener(Protocol):
    """Receiver of the responses that ended in one engine step, at once, group by group.

    Those of a group that a later step continues are passed again in the step that trains on it, with its row numbers.
    """

    def ended(self, ended: Sequence[EndedResponses]) -> None: ...


def columns_of(responses: Sequence[Response]) -> Batch:
    """Return the generation state's columns of finished responses."""
    batch = token_columns(responses)
    finished = [int(response.finish == "stop") for response in responses]
    batch.put_dense("finished", torch.tensor(finished, dtype=torch.int32))
    choices = [response.choices for response in responses if response.choices is not None]
    assert not choices or len(choices) == len(responses), f"{len(choices)} of {len(responses)} have their experts"
    return batch


def token_columns(responses: Sequence[Response]) -> Batch:
    """Return the columns of responses that have a value per token."""
    batch = Batch.of_rows(response.row for response in responses)
    batch.put_lists("response_ids", [response.token_ids for response in responses], torch.int32)
    batch.put_lists("rollout_logprobs", [response.logprobs for response in responses], torch.float32)
    batch.put_lists("versions", [response.versions for response in responses], torch.int32)
    turns = [response.turns for response in responses if response.turns is not None]
    if turns:
        assert len(turns) == len(responses), f"{len(turns)} of {len(responses)} have their turns"
        batch.put_lists(TURNS, turns, torch.int16)
        rewards = [response.turn_rewards or (0.0,) * len(response.token_ids) for response in responses]
        batch.put_lists(TURN_REWARDS, rewards, torch.float32)
    choices = [response.choices for response in responses]
    known = [part for part in choices if part is not None]
    if known:
        lengths = [0 if part is None else part.numel() for part in choices]
        batch.put_ragged(ROUTED_EXPERTS, torch.cat(known), offsets_of(lengths))
    return batch
