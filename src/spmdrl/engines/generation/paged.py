"""The paged KV cache: blocks counted by reference, and the keys and values that they hold.

A row's positions live in blocks of `block_size` tokens, listed in its block table. The rows of a group share their
prompt's blocks; a row copies the last, partly filled one before it writes into it.

Shape letters: `T` packed tokens, `B` rows, `C` blocks of a table, `J` key and value heads, `K` head size of
keys, `V` head size of values.
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
    value_head_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        token_size = self.num_kv_heads * (self.head_size + self.value_head_size)
        return self.num_layers * self.block_size * token_size * self.dtype.itemsize


class PagedCache:
    """Keys and values of every layer in blocks, in two storages that can be freed and taken back."""

    def __init__(self, shape: CacheShape, device: torch.device):
        self.shape = shape
        self.device = device
        # Keys and values apart, since their heads may differ in size; each [layers, blocks, block size, heads, size].
        self._stores: tuple[Tensor, ...] = ()
        self._keys: tuple[Tensor, ...] = ()
        self._values: tuple[Tensor, ...] = ()

    @property
    def num_blocks(self) -> int:
        return self._stores[0].shape[1] if self._stores else 0

    @property
    def num_bytes(self) -> int:
        return sum(store.untyped_storage().nbytes() for store in self._stores)

    def resize(self, num_blocks: int) -> None:
        """Hold `num_blocks` blocks, keeping what the first ones hold; at 0 the storage is freed."""
        old, sizes = self._stores, self.shape
        self._stores, self._keys, self._values = (), (), ()
        if not num_blocks:
            return
        common = (sizes.num_layers, num_blocks, sizes.block_size, sizes.num_kv_heads)
        # Zeros, because masked attention multiplies what was never written by 0, and a NaN would survive that.
        self._stores = tuple(
            torch.zeros((*common, size), dtype=sizes.dtype, device=self.device)
            for size in (sizes.head_size, sizes.value_head_size)
        )
        for store, old_store in zip(self._stores, old, strict=False):
            store[:, : old_store.shape[1]] = old_store
        self._keys, self._values = (store.unbind() for store in self._stores)

    def write(self, layer: int, places_T: Tensor, k_TJK: Tensor, v_TJV: Tensor) -> None:
        """Put keys and values at `places_T`, counted in tokens: block number x block size + place in the block."""
        self._keys[layer].flatten(0, 1).index_copy_(0, places_T, k_TJK)
        self._values[layer].flatten(0, 1).index_copy_(0, places_T, v_TJV)

    def read(self, layer: int, tables_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Copy out the keys [B, C x block_size, J, K], and the values alike, of the rows with these block tables."""
        num_rows, num_table_blocks = tables_BC.shape
        blocks = tables_BC.flatten()

        def gather(stored: Tensor) -> Tensor:
            rows = stored.index_select(0, blocks)
            return rows.view(num_rows, num_table_blocks * self.shape.block_size, *stored.shape[2:])

        return gather(self._keys[layer]), gather(self._values[layer])

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every layer."""
        assert self._stores, "the KV cache sleeps"
        source_index = torch.tensor(sources, device=self.device)
        target_index = torch.tensor(targets, device=self.device)
        for store in self._stores:
            store.index_copy_(1, target_index, store.index_select(1, source_index))
