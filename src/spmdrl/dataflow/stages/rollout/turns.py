"""Rollouts in turns: the model writes, an environment replies, until it ends the row.

Environments with openings are asked for a row's first text before the model's first turn.

    in the engine --turn ended--> waiting for a step --observation--> in the engine
          |                               |
          +--no tokens left--> ended <----+--End, failure, or no room for what it answers

Where an answer doesn't continue what the model has read, the row's next *piece* begins: a conversation read anew.

A row whose turn ended leaves the engine while its step runs, and returns as a request of its own with all its tokens.
It does so a fixed number of engine steps later, however long its step took: the set of rows that decode together, and
so every last bit, depends on tokens only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial

import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.rollout.requests import Answers, Meanwhile, by_request
from spmdrl.dataflow.stages.rollout.turn_row import ReadTurn, TurnRow
from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.environment_runner import StepResult
from spmdrl.engines.environment.episode import Observation, Opening, Reply, Row, Tokens, TurnParts
from spmdrl.engines.environment.journal import Journal
from spmdrl.engines.environment.tool_calls import TurnReader, check_tools
from spmdrl.engines.generation.native.row_steps import Lockstep
from spmdrl.engines.generation.protocol import AnsweringEngine, Decode, Finish, Request, Response
from spmdrl.engines.models.conversation import Conversation, Exchange
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.resources.collectives import broadcast_bytes
from spmdrl.resources.mesh import GenerationMesh
from spmdrl.runtime.supervision.activity import activity, first_few
from spmdrl.runtime.workers.call_pool import Unanswered
from spmdrl.runtime.workers.strikes import Strikes, Subject
from spmdrl.runtime.workers.verdict import Outcome, Verdict

EncodeRead = Callable[[TurnRow, Observation | Reply | Tokens], tuple[list[int], bool]]
"""Tokens of an environment's answer behind a row, and True if they begin a piece.

Raises ValueError for messages that the chat template refuses.
"""


class RolloutTurns:
    """Loop of requests whose rows take turns with an environment.

    All ranks of a replica run the same requests; the first has the pool, and sends the results to the others.
    """

    def __init__(
        self, pool: EnvironmentPool | None, mesh: GenerationMesh, *, lockstep: Lockstep, decode: Decode,
        decode_all: Decode, read: ReadTurn, encode: EncodeRead, vocab_size: int, return_after: int,
        has_openings: bool,
    ):  # fmt: skip
        """`lockstep` connects the replicas that step together; `return_after` counts engine steps.

        `decode` makes the texts for the environment, `decode_all` those searched for stop strings. `vocab_size` is the
        model's: tokenizers may have more tokens than it has embeddings.
        """
        assert (pool is not None) == mesh.is_leader, "the first rank of a replica takes the steps"
        self._pool = pool
        self._axis = mesh.tensor
        self._lockstep = lockstep
        self._decode = decode
        self._decode_all = decode_all
        self._read = read
        self._encode = encode
        self._vocab_size = vocab_size
        self._return_after = return_after
        self._has_openings = has_openings

    def run(
        self, engine: AnsweringEngine, requests: Sequence[Request], prompts: Sequence[Prompt],
        is_enough: Callable[[], bool] | None = None, meanwhile: Meanwhile | None = None,
    ) -> Answers:  # fmt: skip
        """Run like `run_requests`, with a prompt for each request; responses hold all turns.

        Collective over the ranks that the engine computes with.
        """
        rows = {
            row: TurnRow.of_member(request, member, prompt, self._decode_all)
            for request, prompt in zip(requests, prompts, strict=True)
            for member, row in enumerate(request.rows)
        }
        request_of = {row: number for number, request in enumerate(requests) for row in request.rows}
        opened = [row for row in rows.values() if self._has_openings and not row.so_far.token_ids]
        for one in opened:
            self._ask(one, one.begin())
        engine.submit([first for request in requests for first in _first_requests(request, rows)])
        waiting = {one.row: 0 for one in opened}
        activity.rows = partial(_open_rows, rows, waiting)
        num_steps = 0
        while (runs := engine.has_work) or self._lockstep.most(len(waiting)) != [0]:
            if is_enough is not None and is_enough():
                break
            if meanwhile is not None:
                meanwhile.between_steps()
            ended = engine.step() if runs else []
            activity.advance("engine steps")
            num_steps += bool(runs)
            done = [one for response in ended for one in self._after_turn(rows[response.row], response)]
            finished = {one.row for one in done}
            waiting |= {one.row: num_steps + self._return_after for one in ended if one.row not in finished}
            # If nothing runs, the next ones return at once.
            until = num_steps if engine.has_work else max(num_steps, min(waiting.values(), default=0))
            due = [row for row, when in waiting.items() if when <= until]
            done += self._bring_back(engine, [rows[row] for row in due], meanwhile)
            for row in due:
                del waiting[row]
            if done:
                if self._pool is not None:
                    self._pool.end([response.row for response in done])
                yield by_request(done, request_of)
        aborted = engine.abort() if engine.has_work else []
        left = self._left_over(engine, rows, aborted, list(waiting))
        if self._pool is not None:
            self._pool.end()
        if left:
            yield by_request(left, request_of)

    def take_figures(self) -> Mapping[str, Sequence[float]]:
        """Return `EnvironmentPool.take_figures`."""
        return self._pool.take_figures() if self._pool is not None else {}

    def _after_turn(self, row: TurnRow, response: Response) -> list[Response]:
        """Return the whole response if the row can't continue; else start its step."""
        row.take(response)
        if response.finish != "stop":
            return [row.response(response.finish)]
        row.ended = row.episode(self._decode, self._read)
        self._ask(row, row.ended)
        return []

    def _ask(self, row: TurnRow, begun: Row) -> None:
        if self._pool is not None:
            self._pool.submit(row.row, begun, Subject(row.prompt.id, row.prompt.text))

    def _bring_back(
        self, engine: AnsweringEngine, due: Sequence[TurnRow], meanwhile: Meanwhile | None
    ) -> list[Response]:
        """Submit the next turns of these rows; returns the rows that have none."""
        if due and meanwhile is not None:
            meanwhile.until(partial(self._pool.wait, [row.row for row in due]) if self._pool else None)
        ends = [(row, self._finish(row, result, engine.version)) for row, result in self._results(due)]
        requests = [row.turn_request() for row, finish in ends if finish is None]
        if requests or not self._lockstep.is_alone:
            engine.submit(requests)
        return [row.response(finish) for row, finish in ends if finish is not None]

    def _left_over(
        self, engine: AnsweringEngine, rows: dict[int, TurnRow], aborted: Sequence[Response], waiting: Sequence[int]
    ) -> list[Response]:
        """Return the rest when the engine stops early. Running steps are waited for, so that none is repeated."""
        out = [one for response in aborted for one in self._after_turn(rows[response.row], response)]
        for row, result in self._results([rows[row] for row in waiting]):
            out.append(row.response(self._finish(row, result, engine.version) or "aborted"))
        return out

    def _finish(self, row: TurnRow, result: StepResult, version: int) -> Finish | None:
        """Return the row's end after this step, or None if it continues with the observation."""
        if result.verdict is not None:
            row.outcome = Outcome(None, result.verdict, result.error)
        elif result.observation is None:
            if result.reward is not None:
                row.outcome = Outcome(result.reward, Verdict.SCORED if result.reward else Verdict.WRONG)
        else:
            read = result.observation
            row.earn(read.reward)
            row.extend(read)
            try:
                token_ids, begins_piece = self._encode(row, read)
                if max(token_ids, default=0) >= self._vocab_size:
                    raise ValueError(f"{read!r:.200} has a token that the model has no embedding for")
            except ValueError as error:
                row.outcome = Outcome(None, Verdict.MALFORMED, str(error))
                return "stop"
            if len(token_ids) >= row.num_left:
                if row.turn == 0:
                    row.outcome = Outcome(None, Verdict.LEFT_OUT)  # The model wrote nothing to be judged.
                return "length"
            row.read(token_ids, version, begins_piece=begins_piece)
            return None
        return "stop"

    def _results(self, rows: Sequence[TurnRow]) -> list[tuple[TurnRow, StepResult]]:
        """Wait for these rows' steps and return them; none if the run must stop. Collective over the replica."""
        if not rows:
            return []
        payload = None
        if self._pool is not None:
            try:
                results = self._pool.collect([row.row for row in rows])
            except Unanswered:
                results = []
            payload = json.dumps([asdict(result) for result in results]).encode()
        if self._axis.size > 1:
            payload = broadcast_bytes(payload, self._axis.ranks[0], self._axis.group)
        assert payload is not None, "the first rank of a replica takes the steps"
        results = [StepResult.of(one) for one in json.loads(payload)]
        return list(zip(rows, results, strict=True)) if results else []


def _open_rows(rows: Mapping[int, TurnRow], waiting: Mapping[int, int]) -> str:
    """Name the rows that wait for an environment, with their turns; for another thread."""
    named = [f"{row} (turn {rows[row].turn})" for row in list(waiting)]
    return f"the environment answers rows {first_few(named)}" if named else f"{len(rows)} rows"


def _first_requests(request: Request, rows: dict[int, TurnRow]) -> list[Request]:
    """Return the first requests: one for all rows without tokens, so that their prompt is computed once."""
    begun = [rows[row] for row in request.rows if rows[row].so_far.token_ids]
    fresh = [member for member, row in enumerate(request.rows) if rows[row].turn and not rows[row].so_far.token_ids]
    requests = [row.turn_request() for row in begun]
    if fresh:
        numbers, seeds = ([values[member] for member in fresh] for values in (request.rows, request.seeds))
        requests.append(Request(tuple(numbers), request.prompt_ids, tuple(seeds), request.sampling))
    return requests


def build_turns(
    config: EnvironmentConfig, mesh: GenerationMesh, renderer: Renderer, device: torch.device, stack: ExitStack,
    *, vocab_size: int, strikes: Strikes | None = None, journal: Journal | None = None,
) -> RolloutTurns | None:  # fmt: skip
    """Build turns with a configuration's environment, closed with the stack; None without one."""
    if config.key is None:
        return None
    pool = stack.enter_context(EnvironmentPool(config, strikes=strikes, journal=journal)) if mesh.is_leader else None
    tokenizer, conversation, reader = renderer.tokenizer, Conversation(renderer), TurnReader(renderer)
    check, splits = functools.cache(partial(check_tools, renderer)), config.on_fork == "split"

    def anew(row: TurnRow, exchanges: Sequence[Exchange]) -> list[int]:
        """Return the tokens of a row's conversation as the template writes it."""
        (prompt, columns), opening = row.asked, row.opening
        if isinstance(opening, Opening):
            return conversation.begun([*opening.messages, *conversation.messages_of(exchanges)], columns)
        added = opening.text if isinstance(opening, Observation) else ""
        return conversation.anew(prompt, columns, exchanges, opening=added)

    def encode(row: TurnRow, read: Observation | Reply | Tokens) -> tuple[list[int], bool]:
        if isinstance(read, Tokens):
            own = list(read.token_ids)
            return (own, read.opens) if row.turn else (behind_first(row, own), False)
        prompt, columns = row.asked
        if isinstance(read, Observation):
            after = read.after if row.turn else renderer.cut(prompt, columns)[1]
            return tokenizer.encode_foreign(read.text, read.before, after), False
        if row.turn and not isinstance(read, Opening):
            behind = conversation.after_turn(prompt, columns, row.so_far.token_ids[-1], read.messages)
            whole = anew(row, row.exchanges) if splits and row.exchanges else None
            # Compared as texts: a model may write a text in other tokens than the tokenizer does.
            if whole is None or tokenizer.decode_all(whole).startswith(tokenizer.decode_all(row.piece_ids)):
                return behind, False
            return whole, True
        if columns["tools"]:
            check()
        ids = conversation.begun(read.messages, columns)
        return (ids, True) if row.turn else (behind_first(row, ids), False)

    def behind_first(row: TurnRow, ids: list[int]) -> list[int]:
        first = list(row.request.prompt_ids)
        if ids[: len(first)] != first:
            raise ValueError(f"a conversation begins by token {ids[0]}, but those of the chat template by {first}")
        return ids[len(first) :]

    def read(row: TurnRow, places: Sequence[int]) -> TurnParts:
        (prompt, columns), facts = row.asked, pool.facts if pool is not None else None
        ids = tuple(row.so_far.token_ids[place] for place in places)
        is_read = (facts is not None and facts.tools is not None) or (splits and renderer.uses_template(prompt))
        parts = reader.read(ids, renderer.tools_of(columns) or ()) if is_read else TurnParts()
        if facts is None or not facts.has_own_prompts:
            return parts
        num_behind = len(row.so_far.token_ids) - places[0]
        return replace(
            parts, token_ids=ids, logprobs=tuple(row.so_far.logprobs[place] for place in places),
            num_tokens_before=len(row.piece_ids) - num_behind,
        )  # fmt: skip

    return RolloutTurns(
        pool, mesh, lockstep=Lockstep(mesh.expert, device),
        decode=tokenizer.decode, decode_all=tokenizer.decode_all, read=read, encode=encode,
        vocab_size=vocab_size, return_after=config.return_after_steps,
        has_openings=renderer.has_openings,
    )  # fmt: skip
