"""The paged KV cache: keys and values in blocks, their number, holders and prefixes.

A row's positions lie in blocks of `block_size` tokens, listed in its block table. The rows of a group share their
prompt's blocks; a row copies the last, partly filled one before it writes into it.

Shape letters: `T` packed tokens, `B` rows, `C` blocks of a table, `J` key and value heads, `K` head size of
keys, `U` head size of values.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from spmdrl.engines.models.mixers import Recurrent, State, StateKind
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.resources.host_memory import free_host_bytes
from spmdrl.resources.memory import ask_for_huge_pages
from spmdrl.resources.mesh import Axis
from spmdrl.runtime.launch import read_launch_environment

# Padding rows of a batch read and write here; no request ever gets it.
SCRATCH_BLOCK = 0
_ROOT = 0


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
    """Keys and values of every layer in blocks, in two storages that can be freed and reallocated."""

    def __init__(self, shape: CacheShape, device: torch.device):
        self.shape = shape
        self.device = device
        # Separate storages, since their heads may differ in size; each [layers, blocks, heads, block size, size].
        self._heads_J = torch.arange(shape.num_kv_heads, device=device)
        self._stores: tuple[Tensor, ...] = ()
        self._keys: tuple[Tensor, ...] = ()
        self._values: tuple[Tensor, ...] = ()
        # Kept between reads: on a CPU, touching fresh pages takes several times as long as the copy.
        self._workspaces: list[Tensor] = []

    @property
    def num_blocks(self) -> int:
        return self._stores[0].shape[1] if self._stores else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks and of the workspaces for reads."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self._stores, *self._workspaces))

    def resize(self, num_blocks: int) -> None:
        """Resize to `num_blocks` blocks, keeping the first ones' content; 0 frees the storage."""
        old, sizes = self._stores, self.shape
        self._stores, self._keys, self._values = (), (), ()
        self._workspaces = [torch.empty(0, dtype=sizes.dtype, device=self.device) for _ in range(2)]
        if not num_blocks:
            return
        common = (sizes.num_layers, num_blocks, sizes.num_kv_heads, sizes.block_size)
        self._stores = tuple(
            _zeros((*common, size), sizes.dtype, self.device) for size in (sizes.head_size, sizes.value_head_size)
        )
        for store, old_store in zip(self._stores, old, strict=False):
            store[:, : old_store.shape[1]] = old_store
        self._keys, self._values = (store.unbind() for store in self._stores)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys [blocks, J, block_size, K] and values [blocks, J, block_size, U]."""
        return self._keys[layer], self._values[layer]

    def head_places(self, places_T: Tensor) -> Tensor:
        """Return the indexes of these places' heads [T x J] within a layer; the same in all layers.

        Places count tokens: block number x block size + place in the block.
        """
        size, num_heads = self.shape.block_size, self.shape.num_kv_heads
        blocks_T = places_T.div(size, rounding_mode="floor")
        # Head j of place p in block b has index (b x J + j) x block size + p.
        firsts_T = blocks_T * (size * (num_heads - 1)) + places_T
        return (firsts_T[:, None] + self._heads_J * size).flatten()

    def write(self, layer: int, head_places: Tensor, k_TJK: Tensor, v_TJU: Tensor) -> None:
        """Write keys and values at `head_places`."""
        self._keys[layer].flatten(0, 2).index_copy_(0, head_places, k_TJK.flatten(0, 1))
        self._values[layer].flatten(0, 2).index_copy_(0, head_places, v_TJU.flatten(0, 1))

    def read(self, layer: int, tables_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Copy out keys [B, C x block_size, J, K] and values, likewise, of the rows with these block tables.

        Each head's positions are contiguous in memory, as attention reads them. The next read overwrites them.
        """
        # Indexes of each head's blocks in a layer.
        head_blocks_BJC = tables_BC[:, None, :] * self.shape.num_kv_heads + self._heads_J[:, None]
        keys, values = (
            self._gather(number, store[layer], head_blocks_BJC)
            for number, store in enumerate((self._keys, self._values))
        )
        return keys, values

    def _gather(self, number: int, stored: Tensor, head_blocks_BJC: Tensor) -> Tensor:
        """Copy blocks into the workspace of this number; returns a view of it."""
        num_rows, num_heads, _ = head_blocks_BJC.shape
        numel = head_blocks_BJC.numel() * stored[0, 0].numel()
        if self._workspaces[number].numel() < numel:
            self._workspaces[number] = stored.new_empty(numel)
        out = self._workspaces[number][:numel].view(-1, *stored.shape[2:])
        torch.index_select(stored.flatten(0, 1), 0, head_blocks_BJC.flatten(), out=out)
        return out.view(num_rows, num_heads, -1, stored.shape[-1]).transpose(1, 2)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every layer."""
        assert self._stores, "the KV cache sleeps"
        source_index = torch.tensor(sources, device=self.device)
        target_index = torch.tensor(targets, device=self.device)
        for store in self._stores:
            store.index_copy_(1, target_index, store.index_select(1, source_index))


class SlotStore:
    """Recurrent states of layers that are alike, one slot per row."""

    def __init__(self, state: Recurrent, num_layers: int, dtype: torch.dtype, device: torch.device):
        self._shapes = ((state.columns, dtype), (state.matrices, torch.float32))
        self._num_layers, self._device = num_layers, device
        self._stores: tuple[Tensor, ...] = ()

    @property
    def num_blocks(self) -> int:
        return self._stores[0].shape[1] if self._stores else 0

    @property
    def num_bytes(self) -> int:
        return sum(store.untyped_storage().nbytes() for store in self._stores)

    def resize(self, num_slots: int) -> None:
        """Resize to `num_slots` slots, keeping the first ones' content; 0 frees the storage."""
        old, self._stores = self._stores, ()
        if num_slots:
            self._stores = tuple(
                _zeros((self._num_layers, num_slots, *shape), dtype, self._device) for shape, dtype in self._shapes
            )
            for store, old_store in zip(self._stores, old, strict=False):
                store[:, : old_store.shape[1]] = old_store

    def columns(self, layer: int) -> Tensor:
        """Return a layer's last inputs of the convolution [slots, W - 1, C]."""
        return self._stores[0][layer]

    def matrices(self, layer: int) -> Tensor:
        """Return a layer's matrices [slots, H, K, U]."""
        return self._stores[1][layer]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slots in every layer."""
        source_index = torch.tensor(sources, device=self._device)
        target_index = torch.tensor(targets, device=self._device)
        for store in self._stores:
            store.index_copy_(1, target_index, store.index_select(1, source_index))


def block_bytes_of(states: Sequence[State], block_size: int, dtype: torch.dtype) -> dict[StateKind, int]:
    """Return the bytes of one block in all layers of a kind of state: full attention, then windows, then slots."""
    sizes: dict[StateKind, int] = {}
    for state in states:
        sizes[state.kind] = sizes.get(state.kind, 0) + state.block_bytes(block_size, dtype)
    return {kind: sizes[kind] for kind in sorted(sizes, key=lambda kind: (kind.is_slot, kind.window or 0))}


class StateCache:
    """States of all of a rank's layers: layers alike lie together, and all of one kind share a row's table."""

    def __init__(self, states: Sequence[State], block_size: int, dtype: torch.dtype, device: torch.device):
        """Hold what each of these layers keeps on this rank; all starts without blocks."""
        self.device, self.block_size, self.dtype = device, block_size, dtype
        self.block_bytes = block_bytes_of(states, block_size, dtype)
        """Bytes of one block of each kind of state."""
        self.kinds = tuple(self.block_bytes)
        self._stores: dict[State, PagedCache | SlotStore] = {}
        for state in dict.fromkeys(states):
            num_layers = states.count(state)
            if isinstance(state, Recurrent):
                self._stores[state] = SlotStore(state, num_layers, dtype, device)
                continue
            shape = CacheShape(num_layers, block_size, state.num_heads, state.head_size, state.value_head_size, dtype)
            self._stores[state] = PagedCache(shape, device)
        self._layers = [
            LayerState(self._stores[state], states[:layer].count(state), self.kinds.index(state.kind))
            for layer, state in enumerate(states)
        ]

    def layer(self, number: int) -> LayerState:
        """Return the state of a layer."""
        return self._layers[number]

    @property
    def num_blocks(self) -> list[int]:
        """Blocks of each kind."""
        blocks = {state.kind: store.num_blocks for state, store in self._stores.items()}
        return [blocks[kind] for kind in self.kinds]

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in self._stores.values())

    def resize(self, num_blocks: Sequence[int]) -> None:
        """Resize to so many blocks of each kind, keeping the first ones' content; 0 frees the storage."""
        for state, store in self._stores.items():
            store.resize(num_blocks[self.kinds.index(state.kind)])

    def free(self) -> None:
        """Free the storage."""
        self.resize([0] * len(self.kinds))

    def copy_blocks(self, place: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks of the kind at this place, in each of its layers."""
        for state, store in self._stores.items():
            if sources and self.kinds.index(state.kind) == place:
                store.copy_blocks(sources, targets)


class LayerState(NamedTuple):
    """State of one layer."""

    store: PagedCache | SlotStore
    number: int
    """Number of the layer in its store."""
    kind: int
    """Place of its kind among the cache's."""


def affordable_bytes(rollout: RolloutConfig, device: torch.device, axis: Axis) -> tuple[int, str]:
    """Return the bytes that the cache may take of the configured size or share of memory now, and the settings.

    Collective over the replica's ranks, whose schedulers must agree: all get the smallest number.
    """
    budget_bytes, source = _budget(rollout, device)
    if axis.size > 1:
        budget_bytes = -int(axis.max(torch.tensor(-budget_bytes, device=device)))
    return budget_bytes, source


def _budget(rollout: RolloutConfig, device: torch.device) -> tuple[int, str]:
    """Return bytes for the cache of this rank, and the settings that they follow from."""
    share = rollout.gpu_memory_utilization
    if rollout.kv_cache_gib is not None:
        return int(rollout.kv_cache_gib * 2**30), f"rollout.kv_cache_gib {rollout.kv_cache_gib}"
    if device.type == "cpu":
        free_bytes, num_ranks = free_host_bytes(), read_launch_environment(os.environ).local_world_size
        source = f"rollout.gpu_memory_utilization {share} of {free_bytes} free bytes for {num_ranks} ranks of the host"
        return int(share * free_bytes / num_ranks), source
    backend = torch.get_device_module(device)
    backend.empty_cache()
    free_bytes, total_bytes = backend.mem_get_info(device)
    source = f"rollout.gpu_memory_utilization {share} of {total_bytes} bytes, of which {free_bytes} are free,"
    return int(share * total_bytes - (total_bytes - free_bytes)), source


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros: masked attention multiplies unwritten values by 0, which a NaN would survive.

    On a CPU they are fresh pages of the system, cleared at first write: rows reserve blocks for their longest response,
    but most end before, and unreached pages cost neither time nor memory.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes)
    except OSError as failure:
        raise MemoryError(f"out of memory: a KV cache of {num_bytes} bytes ({failure.strerror})") from failure
    flat = torch.frombuffer(pages, dtype=dtype)
    # Reads are scattered over the whole store, and small pages would miss the TLB.
    ask_for_huge_pages(flat.data_ptr(), num_bytes)
    return flat.view(shape)


class BlockPool:
    """Holders of blocks: numbers only. Block 0 is the scratch block, always taken.

    A block without holders is free; if its content was remembered, it idles, and is only handed out when no other is
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
        """Blocks that can be taken, idle ones included."""
        return len(self._free) + len(self._idle)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`, the scratch block included."""
        # The lowest number is handed out first, which keeps used blocks together.
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
        # Last blocks first: among idle ones, a prefix is useful without its continuation, but not vice versa.
        for block in reversed(blocks):
            assert self._holders[block] > 0 and block != SCRATCH_BLOCK, f"block {block} is released too often"
            self._holders[block] -= 1
            if not self._holders[block]:
                if block in self._remembered:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def remember(self, block: int) -> int:
        """Let a held block idle when it is released; returns its `fill_of`, which identifies the content."""
        assert self._holders[block] > 0, f"block {block} is free and holds nothing to remember"
        self._remembered.add(block)
        return self._fills[block]

    def fill_of(self, block: int) -> int:
        """Count how often the block was taken: its content changes only with this number."""
        return self._fills[block]

    def forget(self) -> None:
        """Free all idle blocks."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._remembered.clear()


@dataclass(frozen=True)
class _Known:
    """A block, and the number of its prefix: its tokens and all before them."""

    number: int
    block: int
    fill: int
    """The block's `fill_of` when it got these tokens."""


class PrefixCache:
    """Blocks by prefix; it holds none of them, so they may be taken for something else.

    Tokens themselves are compared, block by block: a block's key is its own tokens and the number of the prefix before
    it; numbers are never reused.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self._pool = pool
        self._block_size = block_size
        self._known: dict[tuple[int, tuple[int, ...]], _Known] = {}
        self._num_prefixes = 0

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Return the blocks of the longest known prefix, held or idle; at least one token is left to compute."""
        number, blocks = _ROOT, []
        for tokens in self._full_blocks(token_ids, len(token_ids) - 1):
            known = self._known.get((number, tokens))
            if known is None or self._pool.fill_of(known.block) != known.fill:
                break
            number = known.number
            blocks.append(known.block)
        return blocks

    def add(self, token_ids: Sequence[int], table: Sequence[int], num_computed: int) -> None:
        """Remember the full blocks of `table`, whose first `num_computed` tokens are computed."""
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
