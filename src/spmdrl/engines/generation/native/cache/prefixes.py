"""Full blocks of the KV cache, found again by the tokens that they and all blocks before them hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmdrl.engines.generation.native.cache.paged import BlockPool

_ROOT = 0


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
