"""Continuous batching: which rows run, and which blocks of the KV cache they may use.

    waiting --admit--> running --finish--> gone

Rows are admitted in the order in which they were submitted, while row slots and blocks suffice. An admitted row has all
the blocks that its longest answer can need reserved, so that it never starves and is never preempted; it takes them
one by one as it grows, and gives all back at once when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spmdrl.engines.generation.choices import RowChoices
from spmdrl.engines.generation.paged import BlockPool
from spmdrl.engines.generation.protocol import Finish, Request, Response


@dataclass(eq=False)
class Row:
    """A running row: its block table and what it has so far."""

    row: int
    seed: int
    request: Request
    table: list[int]
    num_reserved: int
    """Blocks that it may still take."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    choices: RowChoices | None = None
    """Where the tokens fed so far went, if that is recorded."""

    @property
    def length(self) -> int:
        """Positions of the prompt and of all its tokens, the newest included."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def finish(self) -> Finish | None:
        """Why the row ends with its newest token, or None if it goes on."""
        sampling = self.request.sampling
        if self.token_ids and self.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= sampling.max_tokens else None

    def response(self, finish: Finish) -> Response:
        choices = None if self.choices is None else self.choices.packed()
        return Response(self.row, tuple(self.token_ids), tuple(self.logprobs), finish, tuple(self.versions), choices)


@dataclass(eq=False)
class Group:
    """A request of which some rows are still to be admitted."""

    request: Request
    num_admitted: int = 0
    prompt_blocks: list[int] = field(default_factory=list)
    """Held by the group from its first admission to its last."""
    prompt_logits_V: Tensor | None = None
    """What the prompt's last position predicts; whoever runs the prompt leaves it here for the rows admitted later."""
    prompt_choices_TLC: Tensor | None = None
    """Where the prompt's tokens went, if that is recorded; left here likewise."""

    @property
    def num_waiting(self) -> int:
        return len(self.request.rows) - self.num_admitted


@dataclass(frozen=True)
class Admission:
    """Rows of one group that start now; `runs_prompt` when they are its first."""

    group: Group
    rows: list[Row]
    runs_prompt: bool


@dataclass(frozen=True)
class BlockCopies:
    """Blocks to be copied before anything is written, pair by pair."""

    sources: list[int]
    targets: list[int]


class Scheduler:
    """The waiting and the running rows of one engine, over the blocks of one pool."""

    def __init__(self, pool: BlockPool, block_size: int, max_running_rows: int):
        self.running: dict[int, Row] = {}
        self._pool = pool
        self._block_size = block_size
        self._max_running_rows = max_running_rows
        self._waiting: deque[Group] = deque()
        self._unfinished: set[int] = set()
        self._num_reserved = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def num_committed_blocks(self) -> int:
        """Blocks taken or reserved, the scratch block included."""
        return self._pool.num_blocks - self._pool.num_free + self._num_reserved

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the requests, all or none; ValueError for rows that are here already or can never fit."""
        seen = set(self._unfinished)
        for request in requests:
            self._check_fits(request)
            for row in request.rows:
                if row in seen:
                    raise ValueError(f"row {row} is submitted twice; wait for its response or abort it first")
                seen.add(row)
        self._waiting.extend(Group(request) for request in requests)
        self._unfinished = seen

    def blocks_wanted(self, requests: Sequence[Request]) -> int:
        """Pool size with which `requests`, joining what is here, run as many rows at once as there are slots."""
        queue = [*(group.request for group in self._waiting), *requests]
        least = max((self._needed_blocks(request, 1) for request in queue), default=0)
        queue.sort(key=self._own_blocks, reverse=True)
        num_slots, wanted = self._max_running_rows - len(self.running), 0
        for request in queue:
            num_rows = min(num_slots, len(request.rows))
            wanted += self._needed_blocks(request, num_rows) if num_rows else 0
            num_slots -= num_rows
        return max(1 + least, self.num_committed_blocks + wanted)

    def admit(self) -> list[Admission]:
        """Start waiting rows, first come first served, until the next one lacks a slot or blocks."""
        admissions = []
        while self._waiting:
            group = self._waiting[0]
            runs_prompt = not group.num_admitted
            rows = self._admit_rows(group)
            if rows:
                admissions.append(Admission(group, rows, runs_prompt))
            if group.num_waiting:
                break
            # From here on the prompt's blocks belong to the rows alone.
            self._pool.release(group.prompt_blocks)
            self._waiting.popleft()
        assert self.running or not self._waiting, (
            f"nothing runs and nothing starts: {self.num_committed_blocks} of {self._pool.num_blocks} blocks are held"
        )
        return admissions

    def make_room(self) -> BlockCopies:
        """Give each running row a block of its own for its newest position; returns the copies that this takes."""
        copies = BlockCopies([], [])
        for row in self.running.values():
            index = (row.length - 1) // self._block_size
            if index == len(row.table):
                row.table.append(self._take_reserved(row))
            elif self._pool.is_shared(row.table[index]):
                shared, row.table[index] = row.table[index], self._take_reserved(row)
                copies.sources.append(shared)
                copies.targets.append(row.table[index])
                self._pool.release([shared])
        return copies

    def finish(self, row: Row) -> None:
        """Forget a running row and free what it held."""
        del self.running[row.row]
        self._unfinished.remove(row.row)
        self._pool.release(row.table)
        self._num_reserved -= row.num_reserved

    def abort(self) -> list[Response]:
        """Forget all rows; returns them with their tokens so far."""
        responses = []
        for row in list(self.running.values()):
            self.finish(row)
            responses.append(row.response("aborted"))
        for group in self._waiting:
            self._pool.release(group.prompt_blocks)
            waiting_rows = group.request.rows[group.num_admitted :]
            responses.extend(Response(row, (), (), "aborted", ()) for row in waiting_rows)
        self._waiting.clear()
        self._unfinished.clear()
        return responses

    def _admit_rows(self, group: Group) -> list[Row]:
        request, own_blocks = group.request, self._own_blocks(group.request)
        num_prompt_blocks = 0 if group.num_admitted else self._prompt_blocks(request)
        num_available = self._pool.num_blocks - self.num_committed_blocks - num_prompt_blocks
        num_slots = self._max_running_rows - len(self.running)
        num_rows = min(group.num_waiting, num_slots, num_available // own_blocks if own_blocks else num_slots)
        if num_rows <= 0 or num_available < 0:
            return []
        group.prompt_blocks.extend(self._pool.take() for _ in range(num_prompt_blocks))
        members = range(group.num_admitted, group.num_admitted + num_rows)
        group.num_admitted += num_rows
        return [self._start_row(group, member, own_blocks) for member in members]

    def _start_row(self, group: Group, member: int, own_blocks: int) -> Row:
        request = group.request
        self._pool.share(group.prompt_blocks)
        self._num_reserved += own_blocks
        row = Row(request.rows[member], request.seeds[member], request, list(group.prompt_blocks), own_blocks)
        self.running[row.row] = row
        return row

    def _take_reserved(self, row: Row) -> int:
        assert row.num_reserved > 0, f"row {row.row} of length {row.length} outgrows its reserved blocks"
        row.num_reserved -= 1
        self._num_reserved -= 1
        return self._pool.take()

    def _prompt_blocks(self, request: Request) -> int:
        return -(-len(request.prompt_ids) // self._block_size)

    def _own_blocks(self, request: Request) -> int:
        """Most blocks a row takes beside the whole ones of its prompt; its last token is never fed, so never kept."""
        num_positions = len(request.prompt_ids) + request.sampling.max_tokens - 1
        if num_positions == len(request.prompt_ids):
            return 0
        return -(-num_positions // self._block_size) - len(request.prompt_ids) // self._block_size

    def _needed_blocks(self, request: Request, num_rows: int) -> int:
        return self._prompt_blocks(request) + num_rows * self._own_blocks(request)

    def _check_fits(self, request: Request) -> None:
        needed, usable = self._needed_blocks(request, 1), self._pool.num_blocks - 1
        if needed > usable:
            raise ValueError(
                f"row {request.rows[0]} can need {needed} KV blocks ({len(request.prompt_ids)} prompt + "
                f"{request.sampling.max_tokens} new tokens in blocks of {self._block_size}), but the cache has "
                f"{usable}; "
                "raise rollout.kv_cache_gib or rollout.gpu_memory_utilization, or lower rollout.max_completion_length"
            )
