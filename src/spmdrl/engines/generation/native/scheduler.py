"""Continuous batching: which rows run, and which blocks of the KV cache they use.

    waiting --admit--> running --finish--> gone
       ^                  |
       +-----preempt------+

Rows start in the order of submission, while row slots and blocks suffice. A row's prompt runs in chunks,
`max_prefill_tokens` per step; then the row takes blocks as it grows. When they run out, the newest running row returns
to the head of the queue with its tokens, which are run again when it restarts. So the running rows are always the
oldest ones, in order; the oldest is never preempted, and no row starves.

Ranks of one engine decide identically: decisions depend on nothing but the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spmdrl.engines.generation.native.paged import BlockPool, PrefixCache
from spmdrl.engines.generation.native.running_rows import Admission, Branch, Chunk, Group, Row, groups_of
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.nouns.settings.rollout_config import RolloutConfig


@dataclass(frozen=True)
class Admitted:
    """Chunks to run now, then the rows that start."""

    chunks: list[Chunk]
    admissions: list[Admission]


@dataclass(frozen=True)
class BlockCopies:
    """Pairs of blocks to copy; all are read before any is written."""

    sources: list[int]
    targets: list[int]


@dataclass(frozen=True)
class RowBlocks:
    """Counts the blocks of rows, from the limits of their requests."""

    size: int
    """positions of a block"""

    def of(self, num_positions: int) -> int:
        """Return the number of blocks for this many positions."""
        return -(-num_positions // self.size)

    def most(self, request: Request) -> int:
        """Return the most blocks of one of the request's rows."""
        return self.of(_num_positions(request))

    def growth(self, group: Group) -> int:
        """Return the most blocks that a row takes beside the whole ones that it starts from."""
        num_positions = _num_positions(group.request)
        return 0 if num_positions == group.length else self.of(num_positions) - group.length // self.size

    def first(self, group: Group) -> int:
        """Return the free blocks required for one more running row of the group: one for now, one to grow into."""
        return min(2, self.growth(group))

    def is_growing(self, row: Row) -> bool:
        """True if a running row may still take blocks."""
        # A row that may leave a branch, and is fed then, copies a block even if it takes no others.
        may_leave = not row.is_first and row.length < _num_positions(row.request)
        return may_leave or len(row.table) < self.most(row.request)


def _num_positions(request: Request) -> int:
    """Return the most positions of a row; its last token is never fed, so never cached."""
    return len(request.prompt_ids) + request.sampling.max_tokens - 1


class Scheduler:
    """Waiting and running rows of one engine, over the blocks of one pool."""

    def __init__(
        self, pool: BlockPool, rollout: RolloutConfig, *, shares_prefixes: bool = True, merges_rows: bool = True
    ):
        """Without `shares_prefixes`, groups don't share full blocks of equal tokens; without `merges_rows`, each row is
        a branch of its own."""
        self.running: dict[int, Row] = {}
        """Rows by number, oldest first."""
        self._pool = pool
        self._rollout = rollout
        self._blocks = RowBlocks(rollout.block_size)
        self._shares_prefixes = shares_prefixes
        self._merges_rows = merges_rows
        self._prefixes = PrefixCache(pool, rollout.block_size)
        self._waiting: deque[Group] = deque()
        self._unfinished: set[int] = set()

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the requests, all or none. Raises ValueError if a row is a duplicate, has ended or can never fit."""
        seen = set(self._unfinished)
        groups = [group for request in requests for group in groups_of(request)]
        for row in [row for group in groups for row in group.rows]:
            self._check_fits(row)
            if row.row in seen:
                raise ValueError(f"row {row.row} is submitted twice; wait for its response or abort it first")
            if row.finish is not None:
                raise ValueError(
                    f"row {row.row} has ended ({row.finish}) with the tokens that it brings; submit others"
                )
            seen.add(row.row)
        self._waiting.extend(groups)
        self._unfinished = seen

    def blocks_wanted(self, requests: Sequence[Request]) -> int:
        """Return the pool size at which `requests` and all present rows run as many rows at once as there are slots."""
        queue = [*self._waiting, *(group for request in requests for group in groups_of(request))]
        least = max((self._blocks.most(group.request) for group in queue), default=0)
        queue.sort(key=self._blocks.growth, reverse=True)
        num_slots = self._rollout.max_running_rows - len(self.running)
        wanted = self._pool.num_blocks - self._pool.num_free
        # One more each, as a row may have to copy the block that it shares with its siblings.
        wanted += sum(self._blocks.most(row.request) + 1 - len(row.table) for row in self.running.values())
        for group in queue:
            num_rows = min(num_slots, len(group.rows))
            wanted += self._blocks.of(group.length) + num_rows * self._blocks.growth(group) if num_rows else 0
            num_slots -= num_rows
        return max(1 + least, wanted)

    def admit(self) -> Admitted:
        """Start waiting rows, first come first served, until the next one lacks a slot, blocks or its last chunk."""
        admitted, num_tokens = Admitted([], []), self._rollout.max_prefill_tokens
        num_growing = self._num_growing()
        while self._waiting and len(self.running) < self._rollout.max_running_rows:
            group = self._waiting[0]
            if not self._allocate(group, num_growing):
                break
            if group.num_computed < group.length:
                if not num_tokens:
                    break
                admitted.chunks.append(self._next_chunk(group, num_tokens))
                num_tokens -= admitted.chunks[-1].num_tokens
                if group.num_computed < group.length:
                    break
            rows = self._start_rows(group, num_growing)
            num_growing += sum(map(self._blocks.is_growing, rows))
            if rows:
                admitted.admissions.append(Admission(group, rows))
            if len(rows) < len(group.rows):
                del group.rows[: len(rows)]
                break
            # From here on its blocks belong to the rows alone; its chunk, still to be run, only writes into them.
            self._pool.release(group.table)
            self._waiting.popleft()
        assert self.running or admitted.chunks or not self._waiting, (
            f"nothing runs and nothing starts: {self._pool.num_free} of {self._pool.num_blocks} blocks are free"
        )
        return admitted

    def make_room(self) -> BlockCopies:
        """Give each continuing branch a block of its own for its newest position; returns the copies that this needs.

        If blocks run out, the newest rows are preempted.
        """
        copies, size = BlockCopies([], []), self._rollout.block_size
        for row in self.going_on():
            if not row.is_first:
                continue
            index, table = (row.length - 1) // size, row.table
            # Checked again after each freed block: with one holder fewer, the block may no longer be shared.
            while row.row in self.running and (index == len(table) or self._pool.is_shared(table[index])):
                if not self._pool.num_free:
                    self._free_newest()
                elif index == len(table):
                    table.append(self._pool.take())
                else:
                    copies.sources.append(table[index])
                    table[index] = self._pool.take()
                    copies.targets.append(table[index])
                    self._pool.release(copies.sources[-1:])
        return copies

    def fork(self, rows: Iterable[Row]) -> None:
        """Move rows whose newest tokens differ from their branch's others to own branches, over the same blocks."""
        branches = {id(row.branch): row.branch for row in rows if row.branch is not None and len(row.branch.rows) > 1}
        for branch in branches.values():
            branch.rows, *others = branch.parts()
            for part in others:
                self._begin_branch(part, branch.table)

    def going_on(self) -> list[Row]:
        """Return the running rows that may get one more token, oldest first."""
        return [row for row in self.running.values() if not row.is_full]

    def widest_table(self) -> int:
        """Return the most blocks that any running row can take."""
        requests = {id(row.request): row.request for row in self.running.values()}
        return max(map(self._blocks.most, requests.values()))

    def finish(self, row: Row) -> None:
        """Forget a running row and free the blocks that it alone held."""
        del self.running[row.row]
        self._unfinished.remove(row.row)
        self._leave_branch(row)

    def abort(self) -> list[Response]:
        """Forget all rows; returns them with their tokens so far."""
        rows = [*self.running.values(), *(row for group in self._waiting for row in group.rows)]
        for group in self._waiting:
            self._release(group)
        for row in list(self.running.values()):
            self.finish(row)
        self._waiting.clear()
        self._unfinished.clear()
        return [row.response("aborted") for row in rows]

    def forget_prefixes(self) -> None:
        """Recompute prompts that no row has started from yet: the weights or the cache changed."""
        for group in self._waiting:
            self._release(group)
        self._prefixes.clear()

    def _allocate(self, group: Group, num_growing: int) -> bool:
        """Give the group blocks for all its initial tokens, known prefixes shared; False if too few are free.

        While rows run, a block must be left for each of them that can still grow, and the new row's first ones.
        """
        if group.table:
            return True
        known = self._prefixes.find(group.token_ids) if self._shares_prefixes else []
        num_new = self._blocks.of(group.length) - len(known)
        while True:
            wanted = num_new + sum(not self._pool.is_held(block) for block in known)
            if self.running:
                wanted += num_growing + self._blocks.first(group)
            if self._pool.num_free >= wanted:
                break
            if self.running or not self._free_waiting_group():
                return False
        self._pool.share(known)
        group.table = [*known, *(self._pool.take() for _ in range(num_new))]
        group.num_computed = len(known) * self._rollout.block_size
        return True

    def _next_chunk(self, group: Group, num_tokens: int) -> Chunk:
        """Return the group's next chunk; from now on its blocks may be shared by groups whose chunks run after it."""
        start = group.num_computed
        group.num_computed = min(start + num_tokens, group.length)
        if self._shares_prefixes:
            self._prefixes.add(group.token_ids, group.table, group.num_computed)
        return Chunk(group, start, group.num_computed)

    def _start_rows(self, group: Group, num_growing: int) -> list[Row]:
        """Start as many rows of the group as have a slot and find a block or two each; one if nothing runs."""
        num_rows = min(len(group.rows), self._rollout.max_running_rows - len(self.running))
        if first_blocks := self._blocks.first(group):
            num_rows = min(num_rows, max(0, self._pool.num_free - num_growing) // first_blocks)
        if not self.running:
            num_rows = max(num_rows, 1)
        rows = group.rows[:num_rows]
        self.running |= {row.row: row for row in rows}
        for part in [rows] if self._merges_rows and rows else [[row] for row in rows]:
            self._begin_branch(part, group.table)
        return rows

    def _begin_branch(self, rows: list[Row], table: Sequence[int]) -> None:
        """Start a branch of rows over blocks with other holders, too."""
        self._pool.share(table)
        branch = Branch(list(rows), list(table))
        for row in rows:
            row.branch = branch

    def _leave_branch(self, row: Row) -> None:
        """Remove a row that stops; the last one frees the blocks."""
        branch, row.branch = row.branch, None
        assert branch is not None, f"row {row.row} doesn't run"
        branch.rows.remove(row)
        if not branch.rows:
            self._pool.release(branch.table)

    def _free_newest(self) -> None:
        """Free blocks by preempting the row that was admitted last."""
        if self._free_waiting_group():
            return
        assert len(self.running) > 1, f"all {self._pool.num_blocks} blocks don't hold one row, which was checked before"
        _, row = self.running.popitem()
        self._leave_branch(row)
        self._waiting.appendleft(Group([row]))

    def _free_waiting_group(self) -> bool:
        """Free the blocks of the last waiting group that has any; False if none has."""
        for group in reversed(self._waiting):
            if group.table:
                self._release(group)
                return True
        return False

    def _release(self, group: Group) -> None:
        self._pool.release(group.table)
        group.table, group.num_computed, group.logits_V, group.choices = [], 0, None, []

    def _num_growing(self) -> int:
        """Number of running rows that may still take blocks."""
        return sum(map(self._blocks.is_growing, self.running.values()))

    def _check_fits(self, row: Row) -> None:
        needed, usable = self._blocks.most(row.request), self._pool.num_blocks - 1
        if needed > usable:
            raise ValueError(
                f"row {row.row} can need {needed} KV blocks ({len(row.request.prompt_ids)} prompt + "
                f"{row.request.sampling.max_tokens} new tokens in blocks of {self._rollout.block_size}), but the cache "
                f"has {usable}; "
                "raise rollout.kv_cache_gib or rollout.gpu_memory_utilization, or lower rollout.max_completion_length"
            )
