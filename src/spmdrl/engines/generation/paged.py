"""The paged KV cache: blocks counted by reference, and the keys and values that they hold.

A row's positions live in blocks of `block_size` tokens, listed in its block table. The rows of a group share their
prompt's blocks; a row copies the last, partly filled one before it writes into it.

Shape letters: `T` packed tokens, `B` rows, `C` blocks of a table, `J` key and value heads, `K` head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows that only pad a batch read and write here; no request ever gets it.
SCRATCH_BLOCK = 0


class BlockPool:
    """Who holds which block: numbers only. Block 0 is the scratch block, always taken."""

    def __init__(self, num_blocks: int = 1):
        self.num_blocks = 1
        self._free: list[int] = []
        self._holders: list[int] = [1]
        self.grow(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`, the scratch block included."""
        # The lowest number is handed out first, which keeps what is in use together.
        self._free[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)
        self._holders.extend([0] * (num_blocks - self.num_blocks))
        self.num_blocks = max(self.num_blocks, num_blocks)

    def take(self) -> int:
        assert self._free, f"all {self.num_blocks} blocks are taken, although they were reserved before"
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free and can't be shared"
            self._holders[block] += 1

    def is_shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one holder of each block; a block without holders is free."""
        for block in blocks:
            assert self._holders[block] > 0 and block != SCRATCH_BLOCK, f"block {block} is released too often"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the paged cache that don't change while the engine lives."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


class PagedCache:
    """Keys and values of every layer in blocks, in one storage that can be freed and taken back."""

    def __init__(self, shape: CacheShape, device: torch.device):
        self.shape = shape
        self.device = device
        self._store: Tensor | None = None
        self._keys: tuple[Tensor, ...] = ()
        self._values: tuple[Tensor, ...] = ()

    @property
    def num_blocks(self) -> int:
        return 0 if self._store is None else self._store.shape[2]

    @property
    def num_bytes(self) -> int:
        return 0 if self._store is None else self._store.untyped_storage().nbytes()

    def resize(self, num_blocks: int) -> None:
        """Hold `num_blocks` blocks, keeping what the first ones hold; at 0 the storage is freed."""
        old, sizes = self._store, self.shape
        self._store, self._keys, self._values = None, (), ()
        if not num_blocks:
            return
        # Zeros, because masked attention multiplies what was never written by 0, and a NaN would survive that.
        shape = (2, sizes.num_layers, num_blocks, sizes.block_size, sizes.num_kv_heads, sizes.head_size)
        self._store = torch.zeros(shape, dtype=sizes.dtype, device=self.device)
        if old is not None:
            self._store[:, :, : old.shape[2]] = old
        self._keys, self._values = self._store[0].unbind(), self._store[1].unbind()

    def write(self, layer: int, places_T: Tensor, k_TJK: Tensor, v_TJK: Tensor) -> None:
        """Put keys and values at `places_T`, counted in tokens: block number x block size + place in the block."""
        self._keys[layer].flatten(0, 1).index_copy_(0, places_T, k_TJK)
        self._values[layer].flatten(0, 1).index_copy_(0, places_T, v_TJK)

    def read(self, layer: int, tables_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Copy out the keys and values [B, C x block_size, J, K] of the rows with these block tables."""
        num_rows, num_table_blocks = tables_BC.shape
        blocks = tables_BC.flatten()

        def gather(stored: Tensor) -> Tensor:
            rows = stored.index_select(0, blocks)
            return rows.view(num_rows, num_table_blocks * self.shape.block_size, *stored.shape[2:])

        return gather(self._keys[layer]), gather(self._values[layer])

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every layer."""
        assert self._store is not None, "the KV cache sleeps"
        source_index = torch.tensor(sources, device=self.device)
        target_index = torch.tensor(targets, device=self.device)
        self._store.index_copy_(2, target_index, self._store.index_select(2, source_index))
