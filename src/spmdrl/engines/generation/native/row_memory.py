"""Blocks of rows, for every kind of state that a model's layers keep.

Layers with the same kind of state share a row's table of blocks. Full attention keeps the blocks of all positions, and
a window those that it still sees; recurrent states lie in one slot, which is a table of one block. Each kind has a pool
of its own, and a row needs blocks of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spmdrl.engines.generation.native.paged import SCRATCH_BLOCK, BlockPool
from spmdrl.engines.generation.native.running_rows import Group, Row, Tables
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.mixers import StateKind
from spmdrl.nouns.settings.rollout_config import RolloutConfig

_ENDLESS = 1 << 60
"""Positions of a row that no window or slot grows with."""
Counts = list[int]
"""Numbers of blocks, by kind of state."""


@dataclass(frozen=True)
class BlockCopies:
    """Pairs of blocks of one kind of state to copy; all are read before any is written."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class BlockCounts:
    """Counts the blocks that rows need, from the limits of their requests."""

    kinds: Sequence[StateKind]
    size: int
    """positions of a block"""
    most_prefilled: int
    """most positions of a chunk"""

    @classmethod
    def of(cls, kinds: Sequence[StateKind], rollout: RolloutConfig) -> BlockCounts:
        return cls(kinds, rollout.block_size, rollout.max_prefill_tokens)

    def held(self, num_positions: int, num_new: int = 1) -> Counts:
        """Return the most blocks that a row of these positions holds, of which `num_new` are computed at once."""
        return [self._held(kind, num_positions, num_new) for kind in self.kinds]

    def _held(self, kind: StateKind, num_positions: int, num_new: int) -> int:
        if kind.is_slot:
            return 1
        blocks = self.table_length(num_positions)
        # The oldest position that is seen, and the newest one, may lie anywhere in their blocks.
        return blocks if kind.window is None else min(blocks, self.table_length(kind.window + num_new) + 1)

    def of_group(self, group: Group) -> Counts:
        """Return the blocks that a group takes for its first tokens."""
        return self.held(group.length, self.most_prefilled)

    def most(self, request: Request) -> Counts:
        """Return the most blocks of one of the request's rows, which may be preempted and run all its tokens again."""
        most = self.held(num_positions(request), self.most_prefilled)
        # A row that starts before its siblings leaves them the prompt's slot.
        return [count + kind.is_slot for count, kind in zip(most, self.kinds, strict=True)]

    def growth(self, group: Group) -> Counts:
        """Return the most blocks that a row takes beside the whole ones that it starts from."""
        positions, whole = num_positions(group.request), group.length // self.size
        counts = self.held(positions)
        for place, kind in enumerate(self.kinds):
            if not kind.is_slot:
                grown = 0 if positions == group.length else self.table_length(positions) - whole
                counts[place] = min(grown, counts[place]) if kind.window is not None else grown
        return counts

    def first(self, group: Group) -> Counts:
        """Return the free blocks required for one more running row of the group: one for now, one to grow into."""
        return [min(2, count) for count in self.growth(group)]

    def growing(self, rows: Iterable[Row]) -> Counts:
        """Count the running rows that may still take blocks."""
        rows = list(rows)
        return [sum(self._is_growing(row, kind, place) for row in rows) for place, kind in enumerate(self.kinds)]

    def _is_growing(self, row: Row, kind: StateKind, place: int) -> bool:
        if kind.is_slot:
            return not row.is_first
        positions = num_positions(row.request)
        # A row that may leave a branch, and is fed then, copies a block even if it takes no others.
        may_leave = not row.is_first and row.length < positions
        return may_leave or len(row.tables[place]) < self.table_length(positions)

    def table_length(self, num_positions: int) -> int:
        return -(-num_positions // self.size)


def blocks_within(budget: tuple[int, str], block_bytes: Mapping[StateKind, int], rollout: RolloutConfig) -> Counts:
    """Return how many blocks of each kind fit in a budget. Raises ValueError, naming its source, for less than two.

    Windows and slots get what `max_running_rows` rows and one prompt need, at most half of the budget beside full
    attention, which gets the rest.
    """
    budget_bytes, source = budget
    kinds, sizes = list(block_bytes), list(block_bytes.values())
    counts = BlockCounts.of(kinds, rollout)
    of_row, of_prompt = counts.held(_ENDLESS), counts.held(_ENDLESS, rollout.max_prefill_tokens)
    bounded = [place for place, kind in enumerate(kinds) if kind != StateKind()]
    has_full = len(bounded) < len(kinds)
    row_bytes, prompt_bytes = (sum(blocks[place] * sizes[place] for place in bounded) for blocks in (of_row, of_prompt))
    found, left = [0] * len(kinds), budget_bytes
    if bounded:
        num_rows = ((budget_bytes // 2 if has_full else budget_bytes) - prompt_bytes) // row_bytes
        num_rows = max(0, min(num_rows, rollout.max_running_rows))
        for place in bounded:
            # One more is the scratch block.
            found[place] = 1 + num_rows * of_row[place] + of_prompt[place] if num_rows else 0
            left -= found[place] * sizes[place]
    if has_full:
        found[0] = left // sizes[0]
    if min(found) < 2:
        least = max(2 * sum(sizes), (prompt_bytes + row_bytes) * (1 + has_full))
        raise ValueError(
            f"{source} leaves {budget_bytes} bytes for the KV cache, but the least is {least}; raise it or use fewer "
            "layers or smaller heads"
        )
    return found


def bytes_of(blocks: Counts, block_bytes: Mapping[StateKind, int]) -> int:
    return sum(count * size for count, size in zip(blocks, block_bytes.values(), strict=True))


def num_positions(request: Request) -> int:
    """Return the most positions of a row; its last token is never fed, so never cached."""
    return len(request.prompt_ids) + request.sampling.max_tokens - 1


class RowMemory:
    """Pools of blocks by kind of state; rows and groups hold some of them."""

    def __init__(self, kinds: Sequence[StateKind], num_blocks: Sequence[int], block_size: int):
        self.kinds = tuple(kinds)
        self.pools = [BlockPool(count) for count in num_blocks]
        self._size = block_size

    @property
    def num_blocks(self) -> Counts:
        return [pool.num_blocks for pool in self.pools]

    @property
    def num_free(self) -> Counts:
        return [pool.num_free for pool in self.pools]

    @property
    def num_free_to_grow(self) -> int:
        """Free blocks of the scarcest kind that running rows take more of."""
        return min(
            (pool.num_free for kind, pool in zip(self.kinds, self.pools, strict=True) if not kind.is_slot), default=0
        )

    def grow(self, num_blocks: Sequence[int]) -> None:
        """Add free blocks until there are so many."""
        for pool, count in zip(self.pools, num_blocks, strict=True):
            pool.grow(count)

    def take(self, counts: Sequence[int]) -> Tables:
        """Return tables of newly held blocks."""
        return [[pool.take() for _ in range(count)] for pool, count in zip(self.pools, counts, strict=True)]

    def share(self, tables: Tables, copies: Sequence[BlockCopies]) -> Tables:
        """Return tables for one more holder; adds the copies that this needs, as a slot has one holder only."""
        shared = []
        for kind, pool, table, copied in zip(self.kinds, self.pools, tables, copies, strict=True):
            if kind.is_slot:
                shared.append([pool.take()])
                copied.sources.extend(table)
                copied.targets.extend(shared[-1])
            else:
                pool.share(block for block in table if block != SCRATCH_BLOCK)
                shared.append(list(table))
        return shared

    def release(self, tables: Tables) -> None:
        """Drop one holder of each block."""
        for pool, table in zip(self.pools, tables, strict=False):
            pool.release([block for block in table if block != SCRATCH_BLOCK])

    def move_windows(self, tables: Tables, start: int, stop: int) -> None:
        """Let windows move to positions [start, stop), which are computed next.

        Blocks that none of these sees are released, and those for the new positions taken.
        """
        for kind, pool, table in zip(self.kinds, self.pools, tables, strict=True):
            if kind.window is not None:
                self._forget(pool, table, start - kind.window + 1)
                table += [pool.take() for _ in range(-(-stop // self._size) - len(table))]

    def forget_unseen(self, tables: Tables, position: int) -> None:
        """Release the blocks that neither this position nor a later one sees."""
        for kind, pool, table in zip(self.kinds, self.pools, tables, strict=True):
            if kind.window is not None:
                self._forget(pool, table, position - kind.window + 1)

    def _forget(self, pool: BlockPool, table: list[int], first_seen: int) -> None:
        """Release the blocks before the one with the first seen position."""
        unseen = max(0, first_seen) // self._size
        # Those before were released when the window moved here: the first ones left are found from the back.
        while unseen and table[unseen - 1] != SCRATCH_BLOCK:
            unseen -= 1
            pool.release([table[unseen]])
            table[unseen] = SCRATCH_BLOCK


def fits(wanted: Sequence[int], free: Sequence[int]) -> bool:
    """Return True if so many blocks are free."""
    return all(count <= there for count, there in zip(wanted, free, strict=True))


def added(*counts: Sequence[int]) -> Counts:
    return [sum(numbers) for numbers in zip(*counts, strict=True)]
