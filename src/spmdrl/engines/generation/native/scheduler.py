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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spmdrl.engines.generation.native.paged import SCRATCH_BLOCK, BlockPool, PrefixCache
from spmdrl.engines.generation.native.row_memory import (
    BlockCopies,
    BlockCounts,
    Counts,
    RowMemory,
    added,
    blocks_within,
    fits,
    num_positions,
)
from spmdrl.engines.generation.native.running_rows import Admission, Branch, Chunk, Group, Row, Tables, groups_of
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.models.mixers import StateKind
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams


@dataclass(frozen=True)
class Admitted:
    """Chunks to run now, then the rows that start."""

    chunks: list[Chunk]
    admissions: list[Admission]
    copies: list[BlockCopies]
    """Of each kind of state; to run after the chunks."""


class Scheduler:
    """Waiting and running rows of one engine, over the blocks of one memory."""

    def __init__(
        self, memory: RowMemory, rollout: RolloutConfig, *, shares_prefixes: bool = True, merges_rows: bool = True
    ):
        """Without `shares_prefixes`, groups don't share full blocks of equal tokens; without `merges_rows`, each row is
        a branch of its own."""
        self.running: dict[int, Row] = {}
        """Rows by number, oldest first."""
        self._memory = memory
        self._rollout = rollout
        self._counts = BlockCounts.of(memory.kinds, rollout)
        # Windows and slots have lost what a continuation of a known prefix would need.
        self._shares_prefixes = shares_prefixes and memory.kinds == (StateKind(),)
        self._merges_rows = merges_rows
        self._prefixes = PrefixCache(memory.pools[0], rollout.block_size)
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

    def blocks_wanted(self, requests: Sequence[Request]) -> Counts:
        """Return the pool sizes at which `requests` and all present rows run as many rows at once as there are
        slots."""
        counts, memory = self._counts, self._memory
        queue = [*self._waiting, *(group for request in requests for group in groups_of(request))]
        queue.sort(key=counts.growth, reverse=True)
        num_slots = self._rollout.max_running_rows - len(self.running)
        wanted = [count - free for count, free in zip(memory.num_blocks, memory.num_free, strict=True)]
        for row in self.running.values():
            # One more each, as a row may have to copy the block that it shares with its siblings.
            held = [sum(block != SCRATCH_BLOCK for block in table) for table in row.tables]
            wanted = [a + most + 1 - b for a, most, b in zip(wanted, counts.most(row.request), held, strict=True)]
        for group in queue:
            num_rows = min(num_slots, len(group.rows))
            if num_rows:
                wanted = added(wanted, counts.of_group(group), [num_rows * count for count in counts.growth(group)])
            num_slots -= num_rows
        least = [counts.most(group.request) for group in queue]
        return [max(1 + max(most), count) for *most, count in zip([0] * len(wanted), *least, wanted, strict=True)]

    def admit(self) -> Admitted:
        """Start waiting rows, first come first served, until the next one lacks a slot, blocks or its last chunk."""
        admitted = Admitted([], [], [BlockCopies() for _ in self._memory.kinds])
        num_tokens, growing = self._rollout.max_prefill_tokens, self._counts.growing(self.running.values())
        while self._waiting and len(self.running) < self._rollout.max_running_rows:
            group = self._waiting[0]
            if not self._allocate(group, growing):
                break
            if group.num_computed < group.length:
                if not num_tokens:
                    break
                admitted.chunks.append(self._next_chunk(group, num_tokens))
                num_tokens -= admitted.chunks[-1].num_tokens
                if group.num_computed < group.length:
                    break
            rows = self._start_rows(group, growing, admitted.copies)
            growing = added(growing, self._counts.growing(rows))
            if rows:
                admitted.admissions.append(Admission(group, rows))
            if len(rows) < len(group.rows):
                del group.rows[: len(rows)]
                break
            self._waiting.popleft()
        assert self.running or admitted.chunks or not self._waiting, (
            f"nothing runs and nothing starts: {self._memory.num_free} of {self._memory.num_blocks} blocks are free"
        )
        return admitted

    def make_room(self) -> list[BlockCopies]:
        """Give each continuing branch a block of its own for its newest position, of each kind; returns the copies that
        this needs.

        If blocks run out, the newest rows are preempted.
        """
        copies = [BlockCopies() for _ in self._memory.kinds]
        for row in self.going_on():
            if row.is_first:
                self._memory.forget_unseen(row.tables, row.length - 1)
                for place, kind in enumerate(self._memory.kinds):
                    if not kind.is_slot:
                        self._make_room(row, self._memory.pools[place], place, copies[place])
        return copies

    def _make_room(self, row: Row, pool: BlockPool, place: int, copies: BlockCopies) -> None:
        index = (row.length - 1) // self._rollout.block_size
        # Checked again after each freed block: with one holder fewer, the block may no longer be shared.
        while row.row in self.running:
            table = row.tables[place]
            if index < len(table) and not pool.is_shared(table[index]):
                return
            if not pool.num_free:
                self._free_newest()
            elif index == len(table):
                table.append(pool.take())
            else:
                copies.sources.append(table[index])
                table[index] = pool.take()
                copies.targets.append(table[index])
                pool.release(copies.sources[-1:])

    def fork(self, rows: Iterable[Row]) -> list[BlockCopies]:
        """Move rows whose newest tokens differ from their branch's others to own branches; returns the copies that this
        needs."""
        copies = [BlockCopies() for _ in self._memory.kinds]
        branches = {id(row.branch): row.branch for row in rows if row.branch is not None and len(row.branch.rows) > 1}
        for branch in branches.values():
            branch.rows, *others = branch.parts()
            for part in others:
                _begin_branch(part, self._memory.share(branch.tables, copies))
        return copies

    def going_on(self) -> list[Row]:
        """Return the running rows that may get one more token, oldest first."""
        return [row for row in self.running.values() if not row.is_full]

    def widest_table(self) -> int:
        """Return the length of the longest table that any running row can have."""
        requests = {id(row.request): row.request for row in self.running.values()}
        return max(self._counts.table_length(num_positions(request)) for request in requests.values())

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

    def _allocate(self, group: Group, growing: Counts) -> bool:
        """Give the group blocks for its initial tokens, known prefixes shared; False if too few are free.

        While rows run, a block must be left for each of them that can still grow, and the new row's first ones.
        """
        if group.tables:
            return True
        known = self._prefixes.find(group.token_ids) if self._shares_prefixes else []
        taken, pool = self._counts.of_group(group), self._memory.pools[0]
        taken[0] -= len(known)
        while True:
            wanted = list(taken)
            wanted[0] += sum(not pool.is_held(block) for block in known)
            if self.running:
                wanted = added(wanted, growing, self._counts.first(group))
            if fits(wanted, self._memory.num_free):
                break
            if self.running or not self._free_waiting_group():
                return False
        pool.share(known)
        group.tables = self._memory.take(taken)
        group.tables[0][:0] = known
        group.num_computed = len(known) * self._rollout.block_size
        return True

    def _next_chunk(self, group: Group, num_tokens: int) -> Chunk:
        """Return the group's next chunk; from now on its blocks may be shared by groups whose chunks run after it."""
        start = group.num_computed
        group.num_computed = min(start + num_tokens, group.length)
        self._memory.move_windows(group.tables, start, group.num_computed)
        if self._shares_prefixes:
            self._prefixes.add(group.token_ids, group.tables[0], group.num_computed)
        return Chunk(group, start, group.num_computed)

    def _start_rows(self, group: Group, growing: Counts, copies: list[BlockCopies]) -> list[Row]:
        """Start as many rows of the group as have a slot and find a block or two each; one if nothing runs."""
        num_rows = min(len(group.rows), self._rollout.max_running_rows - len(self.running))
        for first, free, reserved in zip(self._counts.first(group), self._memory.num_free, growing, strict=True):
            if first:
                num_rows = min(num_rows, max(0, free - reserved) // first)
        if not self.running:
            num_rows = max(num_rows, 1)
        rows = group.rows[:num_rows]
        self.running |= {row.row: row for row in rows}
        parts = [rows] if self._merges_rows and rows else [[row] for row in rows]
        for part in parts:
            # The last rows have the group's own blocks; its chunk, still to be run, only writes into them.
            is_last = part is parts[-1] and len(rows) == len(group.rows)
            _begin_branch(part, group.tables if is_last else self._memory.share(group.tables, copies))
        return rows

    def _leave_branch(self, row: Row) -> None:
        """Remove a row that stops; the last one frees the blocks."""
        branch, row.branch = row.branch, None
        assert branch is not None, f"row {row.row} doesn't run"
        branch.rows.remove(row)
        if not branch.rows:
            self._memory.release(branch.tables)

    def _free_newest(self) -> None:
        """Free blocks by preempting the row that was admitted last."""
        if self._free_waiting_group():
            return
        assert len(self.running) > 1, f"all {self._memory.num_blocks} blocks don't hold one row, which was checked"
        _, row = self.running.popitem()
        self._leave_branch(row)
        self._waiting.appendleft(Group([row]))

    def _free_waiting_group(self) -> bool:
        """Free the blocks of the last waiting group that has any; False if none has."""
        for group in reversed(self._waiting):
            if group.tables:
                self._release(group)
                return True
        return False

    def _release(self, group: Group) -> None:
        self._memory.release(group.tables)
        group.tables, group.num_computed, group.logits_V, group.choices = [], 0, None, []

    def _check_fits(self, row: Row) -> None:
        needed, usable = self._counts.most(row.request), [count - 1 for count in self._memory.num_blocks]
        if not fits(needed, usable):
            raise ValueError(
                f"row {row.row} can need {_numbers(needed)} KV blocks ({len(row.request.prompt_ids)} prompt + "
                f"{row.request.sampling.max_tokens} new tokens in blocks of {self._rollout.block_size}), but the cache "
                f"has {_numbers(usable)}; "
                "raise rollout.kv_cache_gib or rollout.gpu_memory_utilization, or lower rollout.max_completion_length"
            )


def planned_blocks(
    block_bytes: Mapping[StateKind, int], rollout: RolloutConfig, *, num_groups: int, group_size: int, num_tokens: int
) -> Counts:  # fmt: skip
    """Return the blocks of each kind that an engine allots to groups of new rows, submitted at once.

    Each row may have `num_tokens`, of which the response takes all that it may have.
    """
    gib = rollout.kv_cache_gib
    budget_bytes = 1 << 60 if gib is None else int(gib * 2**30)
    most = blocks_within((budget_bytes, f"rollout.kv_cache_gib {gib}"), block_bytes, rollout)
    if gib is not None:
        return most
    num_prompt = max(1, num_tokens - rollout.max_completion_length)
    sampling = SamplingParams(max_tokens=num_tokens - num_prompt)
    request = Request(tuple(range(group_size)), (0,) * num_prompt, (0,) * group_size, sampling)
    memory = RowMemory(tuple(block_bytes), [1] * len(block_bytes), rollout.block_size)
    wanted = Scheduler(memory, rollout).blocks_wanted([request] * min(num_groups, rollout.max_running_rows))
    return list(map(min, wanted, most))


def _begin_branch(rows: list[Row], tables: Tables) -> None:
    """Start a branch of rows over these blocks."""
    branch = Branch(list(rows), tables)
    for row in rows:
        row.branch = branch


def _numbers(counts: Counts) -> str:
    """Return the counts of each kind of state, to be read."""
    return " + ".join(map(str, counts))
