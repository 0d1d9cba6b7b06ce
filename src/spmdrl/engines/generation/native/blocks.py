"""Blocks of the KV cache by number: who holds which, and which prefixes of tokens full blocks hold.

A row's positions lie in blocks of `block_size` tokens, listed in its block table. The rows of a group share their
prompt's blocks; a row copies the last, partly filled one before it writes into it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Rows that only pad a batch read and write here; no request ever gets it.
SCRATCH_BLOCK = 0
_ROOT = 0


class BlockPool:
    """Who holds which block: numbers only. Block 0 is the scratch block, always taken.

    A block that no row holds is free; one whose content was remembered idles, and is handed out only when no other is
    left, longest idle first. Until then it can be shared again.
    """

    def __init__(self, num_blocks: int = 1):
        self.num_blocks = 1
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._remembered: set[int] = set()
        self._holders: list[int] = [1]
        self._fills: list[int] = [0]
        self.grow(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, the idle ones included."""
        return len(self._free) + len(self._idle)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`, the scratch block included."""
        # The lowest number is handed out first, which keeps what is in use together.
        self._free[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)
        self._holders.extend([0] * (num_blocks - self.num_blocks))
        self._fills.extend([0] * (num_blocks - self.num_blocks))
        self.num_blocks = max(self.num_blocks, num_blocks)

    def take(self) -> int:
        assert self.num_free, f"all {self.num_blocks} blocks are taken"
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._remembered.remove(block)
        self._holders[block] = 1
        self._fills[block] += 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._holders[block] > 0 or block in self._idle, f"block {block} is free and can't be shared"
            self._idle.pop(block, None)
            self._holders[block] += 1

    def is_shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def is_held(self, block: int) -> bool:
        return self._holders[block] > 0

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each block; a block without holders is free."""
        # Last blocks first: of those that idle, a prefix is of use without what follows it, but not the other way.
        for block in reversed(blocks):
            assert self._holders[block] > 0 and block != SCRATCH_BLOCK, f"block {block} is released too often"
            self._holders[block] -= 1
            if not self._holders[block]:
                if block in self._remembered:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def remember(self, block: int) -> int:
        """Let a held block idle when it is released; returns its `fill_of`, by which it is known."""
        assert self._holders[block] > 0, f"block {block} is free and holds nothing to remember"
        self._remembered.add(block)
        return self._fills[block]

    def fill_of(self, block: int) -> int:
        """How often the block was taken: as long as that stays the same, so does what it was filled with."""
        return self._fills[block]

    def forget(self) -> None:
        """Let nothing idle any more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._remembered.clear()


@dataclass(frozen=True)
class _Known:
    """A block, and the number that stands for its tokens and all before them."""

    number: int
    block: int
    fill: int
    """How often the block had been taken when it got these tokens."""


class PrefixCache:
    """Which blocks hold which prefix; it holds none of them, so a block may be taken for something else.

    Tokens themselves are compared, block by block: a block is looked up by its own tokens and by the number of the
    prefix before it, which is never given twice.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self._pool = pool
        self._block_size = block_size
        self._known: dict[tuple[int, tuple[int, ...]], _Known] = {}
        self._num_prefixes = 0

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks of the longest known prefix, held or idle; at least one token is left to compute."""
        number, blocks = _ROOT, []
        for tokens in self._full_blocks(token_ids, len(token_ids) - 1):
            known = self._known.get((number, tokens))
            if known is None or self._pool.fill_of(known.block) != known.fill:
                break
            number = known.number
            blocks.append(known.block)
        return blocks

    def add(self, token_ids: Sequence[int], table: Sequence[int], num_computed: int) -> None:
        """Remember the full ones of the blocks `table`, whose first `num_computed` tokens are there."""
        number = _ROOT
        for block, tokens in zip(table, self._full_blocks(token_ids, num_computed), strict=False):
            known = self._known.get((number, tokens))
            if known is None or self._pool.fill_of(known.block) != known.fill:
                self._num_prefixes += 1
                known = _Known(self._num_prefixes, block, self._pool.remember(block))
                self._known[number, tokens] = known
            number = known.number

    def clear(self) -> None:
        self._known.clear()
        self._pool.forget()

    def _full_blocks(self, token_ids: Sequence[int], num_tokens: int) -> Iterator[tuple[int, ...]]:
        size = self._block_size
        for stop in range(size, num_tokens + 1, size):
            yield tuple(token_ids[stop - size : stop])
