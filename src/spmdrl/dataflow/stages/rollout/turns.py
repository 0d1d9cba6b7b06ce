"""Rollouts in turns: the model writes, an environment answers, until it ends the row.

    in the engine --turn ended--> waiting for a step --observation--> in the engine
          |                               |
          +--no tokens left--> ended <----+--End, failure, or no room for what it answers

A row whose turn ended leaves the engine while its step runs, and comes back as a request of its own with all that it
has. It does so a fixed number of engine steps later, however long its step took: who runs beside whom, and so every
last bit, depends on tokens alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.model_tokens import turn_texts
from spmdrl.dataflow.stages.rollout.requests import by_request, run_requests
from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.environment_runner import StepResult
from spmdrl.engines.environment.episode import Episode, Turn
from spmdrl.engines.generation.native.lockstep import Lockstep
from spmdrl.engines.generation.native.stop_strings import Decode, completes_stop_string
from spmdrl.engines.generation.protocol import Finish, GenerationEngine, PartialResponse, Request, Response
from spmdrl.engines.workers.verdict import Outcome, Verdict
from spmdrl.resources.collectives import broadcast_bytes
from spmdrl.resources.mesh import GenerationMesh

Encode = Callable[[str], list[int]]
"""The tokens of a text, without those that begin or end one."""


@dataclass(eq=False)
class TurnRow:
    """A row that takes turns: its tokens so far, and where the present turn begins."""

    request: Request
    member: int
    prompt: Prompt
    so_far: PartialResponse = field(default_factory=lambda: PartialResponse((), (), (), None, ()))
    turn: int = 1
    start: int = 0
    """tokens before the present turn"""
    outcome: Outcome | None = None

    @classmethod
    def of_member(cls, request: Request, member: int, prompt: Prompt, decode: Decode) -> TurnRow:
        """A row of the request, with what it brings along."""
        given = request.given[member]
        if not given.token_ids:
            return cls(request, member, prompt)
        assert given.turns is not None, f"row {request.rows[member]} has tokens, but not their turns"
        last = max(given.turns)
        row = cls(request, member, prompt, given, last, given.turns.index(last))
        # What was carried over has had its step, be it one that answered nothing.
        if not given.turns[-1] or _is_over(given.token_ids[row.start :], request, decode):
            row.begin_turn()
        return row

    @property
    def row(self) -> int:
        return self.request.rows[self.member]

    @property
    def num_left(self) -> int:
        """Tokens that the row may still get."""
        return self.request.sampling.max_tokens - len(self.so_far.token_ids)

    def begin_turn(self) -> None:
        """Whatever comes next is another turn of the model."""
        self.turn, self.start = self.turn + 1, len(self.so_far.token_ids)

    def turn_request(self) -> Request:
        """The present turn as the engine answers it: all before it is the prompt."""
        given, start = self.so_far, self.start
        in_turn = PartialResponse(
            given.token_ids[start:], given.logprobs[start:], given.versions[start:], given.choices
        )
        sampling = self.request.sampling
        return Request(
            (self.row,),
            (*self.request.prompt_ids, *given.token_ids[:start]),
            # Engines whose random numbers begin with each request must not repeat those of the turns before.
            ((self.request.seeds[self.member] + start) % (1 << 63),),
            replace(sampling, max_tokens=sampling.max_tokens - start),
            partial=(in_turn,) if in_turn.token_ids else None,
        )

    def take(self, response: Response) -> None:
        """Add what the engine gave in the present turn, in place of what it was given of it."""
        before, start = self.so_far, self.start
        assert before.turns is not None
        self.so_far = PartialResponse(
            before.token_ids[:start] + response.token_ids,
            before.logprobs[:start] + response.logprobs,
            before.versions[:start] + response.versions,
            _continued(before, response),
            before.turns[:start] + (self.turn,) * len(response.token_ids),
        )

    def read(self, token_ids: Sequence[int], version: int) -> None:
        """Add what the environment gave the model to read, and begin another turn."""
        before, num_new = self.so_far, len(token_ids)
        assert before.turns is not None
        self.so_far = PartialResponse(
            before.token_ids + tuple(token_ids),
            before.logprobs + (0.0,) * num_new,
            before.versions + (version,) * num_new,
            before.choices,
            before.turns + (0,) * num_new,
        )
        self.begin_turn()

    def episode(self, decode: Decode) -> Episode:
        """The row as the environment sees it when the present turn has ended."""
        given = self.so_far
        assert given.turns is not None
        *before, (text, _) = turn_texts(given.token_ids, given.turns, decode)
        turns = tuple(Turn(*texts) for texts in before)
        seed = self.request.seeds[self.member]
        return Episode(self.prompt.original, dict(self.prompt.columns), seed, turns, text)

    def response(self, finish: Finish) -> Response:
        given = self.so_far
        return Response(
            self.row, given.token_ids, given.logprobs, finish, given.versions, given.choices, given.turns, self.outcome
        )


class RolloutTurns:
    """Runs requests whose rows take turns with an environment.

    The ranks of a replica run the same; the first of them has the pool, and the others get its results.
    """

    def __init__(
        self, pool: EnvironmentPool | None, mesh: GenerationMesh, *, lockstep: Lockstep, decode: Decode,
        encode: Encode, vocab_size: int, return_after: int,
    ):  # fmt: skip
        """`lockstep` joins the replicas that step together; `return_after` counts engine steps.

        `vocab_size` is the model's: tokenizers may have more tokens than it has embeddings.
        """
        assert (pool is not None) == mesh.is_leader, "the first rank of a replica takes the steps"
        self._pool = pool
        self._axis = mesh.tensor
        self._lockstep = lockstep
        self._decode = decode
        self._encode = encode
        self._vocab_size = vocab_size
        self._return_after = return_after

    def run(
        self, engine: GenerationEngine, requests: Sequence[Request], prompts: Sequence[Prompt],
        is_enough: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[int, list[Response]]]:  # fmt: skip
        """As `run_requests`, with a prompt for each request; responses hold all turns.

        Collective over the ranks that the engine computes with.
        """
        rows = {
            row: TurnRow.of_member(request, member, prompt, self._decode)
            for request, prompt in zip(requests, prompts, strict=True)
            for member, row in enumerate(request.rows)
        }
        request_of = {row: number for number, request in enumerate(requests) for row in request.rows}
        engine.submit([first for request in requests for first in _first_requests(request, rows)])
        waiting: dict[int, int] = {}
        num_steps = 0
        while (runs := engine.has_work) or self._lockstep.most(len(waiting)) != [0]:
            if is_enough is not None and is_enough():
                break
            ended = engine.step() if runs else []
            num_steps += bool(runs)
            done = [one for response in ended for one in self._after_turn(rows[response.row], response)]
            finished = {one.row for one in done}
            waiting |= {one.row: num_steps + self._return_after for one in ended if one.row not in finished}
            # Where nothing runs there is nothing to wait beside.
            due = [row for row, when in waiting.items() if when <= num_steps or not engine.has_work]
            done += self._bring_back(engine, [rows[row] for row in due])
            waiting = {row: when for row, when in waiting.items() if row not in due}
            yield from by_request(done, request_of)
        aborted = engine.abort() if engine.has_work else []
        yield from by_request(self._carried(engine, rows, aborted, list(waiting)), request_of)

    def _after_turn(self, row: TurnRow, response: Response) -> list[Response]:
        """The whole response where the row can't go on; else its step is under way."""
        row.take(response)
        if response.finish != "stop":
            return [row.response(response.finish)]
        if self._pool is not None:
            self._pool.submit(row.row, row.episode(self._decode))
        return []

    def _bring_back(self, engine: GenerationEngine, due: Sequence[TurnRow]) -> list[Response]:
        """Submit the next turns of these rows; returns the rows that have none."""
        ends = [(row, self._finish(row, result, engine.version)) for row, result in self._results(due)]
        requests = [row.turn_request() for row, finish in ends if finish is None]
        if requests or not self._lockstep.is_alone:
            engine.submit(requests)
        return [row.response(finish) for row, finish in ends if finish is not None]

    def _carried(
        self, engine: GenerationEngine, rows: dict[int, TurnRow], aborted: Sequence[Response], waiting: Sequence[int]
    ) -> list[Response]:
        """What is left when the engine stops early. Steps under way are waited for, so that none is taken twice."""
        out = [one for response in aborted for one in self._after_turn(rows[response.row], response)]
        for row, result in self._results([rows[row] for row in waiting]):
            out.append(row.response(self._finish(row, result, engine.version) or "aborted"))
        return out

    def _finish(self, row: TurnRow, result: StepResult, version: int) -> Finish | None:
        """How the row ends with this step, or None where it goes on with what it reads."""
        if result.verdict is not None:
            row.outcome = Outcome(None, result.verdict, result.error)
        elif result.observation is None:
            if result.reward is not None:
                row.outcome = Outcome(result.reward, Verdict.SCORED if result.reward else Verdict.WRONG)
        else:
            token_ids = self._encode(result.observation)
            if max(token_ids, default=0) >= self._vocab_size:
                error = f"{result.observation!r:.200} has a token that the model has no embedding for"
                row.outcome = Outcome(None, Verdict.MALFORMED, error)
                return "stop"
            if len(token_ids) >= row.num_left:
                return "length"
            row.read(token_ids, version)
            return None
        return "stop"

    def _results(self, rows: Sequence[TurnRow]) -> list[tuple[TurnRow, StepResult]]:
        """The steps of these rows, waited for. Collective over the replica."""
        if not rows:
            return []
        payload = None
        if self._pool is not None:
            payload = json.dumps([asdict(result) for result in self._pool.collect([row.row for row in rows])]).encode()
        if self._axis.size > 1:
            payload = broadcast_bytes(payload, self._axis.ranks[0], self._axis.group)
        assert payload is not None, "the first rank of a replica takes the steps"
        return [(row, StepResult.of(one)) for row, one in zip(rows, json.loads(payload), strict=True)]


def run_rollout(
    engine: GenerationEngine, requests: Sequence[Request], prompts: Sequence[Prompt], turns: RolloutTurns | None,
    is_enough: Callable[[], bool] | None = None,
) -> Iterator[tuple[int, list[Response]]]:  # fmt: skip
    """Run the requests, each with its prompt, in one turn or, with `turns`, in several; see `run_requests`."""
    if turns is None:
        return run_requests(engine, requests, is_enough)
    return turns.run(engine, requests, prompts, is_enough)


def _first_requests(request: Request, rows: dict[int, TurnRow]) -> list[Request]:
    """What the engine is asked first: of rows without tokens together, so that their prompt is computed once."""
    begun = [rows[row] for row in request.rows if rows[row].so_far.token_ids]
    fresh = [member for member, row in enumerate(request.rows) if not rows[row].so_far.token_ids]
    requests = [row.turn_request() for row in begun]
    if fresh:
        numbers, seeds = ([values[member] for member in fresh] for values in (request.rows, request.seeds))
        requests.append(Request(tuple(numbers), request.prompt_ids, tuple(seeds), request.sampling))
    return requests


def _is_over(turn_ids: Sequence[int], request: Request, decode: Decode) -> bool:
    """Whether a stop token or a stop string ended these tokens of one turn."""
    sampling = request.sampling
    if turn_ids[-1] in sampling.stop_token_ids:
        return True
    return bool(sampling.stop_strings) and completes_stop_string(turn_ids, sampling.stop_strings, decode)


def _continued(before: PartialResponse, response: Response) -> torch.Tensor | None:
    """The experts of all tokens fed; those that were known keep what was chosen when they were drawn from."""
    if before.choices is None or response.choices is None:
        return response.choices
    return torch.cat((before.choices, response.choices[len(before.choices) :]))
