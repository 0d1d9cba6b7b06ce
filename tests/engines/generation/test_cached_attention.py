"""A chunk attends to what is cached before it, and rounds alike however rows are cut and whatever is beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.engines.generation.native.cached_attention import PrefillAttention, Span
from spmdrl.engines.generation.native.paged import CacheShape, PagedCache, StateCache
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.engines.models.mixers import KeyBlocks
from spmdrl.nouns.batch import offsets_of
from tests.support.chosen_device import chosen_device, chosen_kind

LENGTHS = [1, 5, 32, 33, 100, 7, 70]


class Rows:
    """Rows of random queries, keys and values, and blocks for them in a cache."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        value_size: int,
        block_size: int,
        window: int | None = None,
    ):
        state = KeyBlocks(num_kv_heads, head_size, value_size, window)
        self.cache = StateCache([state], block_size, torch.float32, chosen_device())
        self.tables, num_blocks = [], 1
        for length in LENGTHS:
            stop = num_blocks + -(-length // block_size)
            self.tables.append(list(range(num_blocks, stop))[::-1])
            num_blocks = stop
        self.cache.resize([num_blocks])
        generator = torch.Generator().manual_seed(0)
        sizes = ((num_heads, head_size), (num_kv_heads, head_size), (num_kv_heads, value_size))
        self.heads = [torch.randn(sum(LENGTHS), *size, generator=generator).to(chosen_device()) for size in sizes]
        self.offsets = offsets_of(LENGTHS).tolist()

    def attend(self, *spans: tuple[int, int, int], **seen: Any) -> list[Tensor]:
        """What these spans (row, start, stop), run in one forward, get."""
        index = [self.offsets[row] + place for row, start, stop in spans for place in range(start, stop)]
        attend = PrefillAttention(self.cache, [Span([self.tables[row]], start, stop) for row, start, stop in spans])
        out = attend(0, *(heads[index] for heads in self.heads), **seen)
        return list(out.split([stop - start for _, start, stop in spans]))

    def alone(self, cut: int, **seen: Any) -> list[Tensor]:
        """What each row gets when it runs alone, in two chunks."""
        rows = []
        for row, length in enumerate(LENGTHS):
            bounds = sorted({0, min(cut, length), length})
            chunks = [self.attend((row, *pair), **seen)[0] for pair in zip(bounds[:-1], bounds[1:], strict=True)]
            rows.append(torch.cat(chunks))
        return rows


@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (1, False), (20, True), (70, False), (None, True)])
@pytest.mark.parametrize("heads", [(4, 2, 16, 16), (6, 6, 12, 6), (8, 1, 64, 64)], ids=str)
@pytest.mark.parametrize("block_size", [4, 5, 16])
def test_whole_rows_and_chunks_get_the_same_bits(
    heads: tuple[int, int, int, int], block_size: int, window: int | None, has_sinks: bool
) -> None:
    rows = Rows(*heads, block_size, window)
    seen = {"window": window, "sinks_H": torch.linspace(-1, 3, heads[0]).to(chosen_device()) if has_sinks else None}
    together = rows.attend(*((row, 0, length) for row, length in enumerate(LENGTHS)), **seen)
    expected = PackedCausalAttention(offsets_of(LENGTHS))(0, *rows.heads, **seen).split(LENGTHS)
    for own, reference in zip(together, expected, strict=True):
        torch.testing.assert_close(own, reference, atol=1e-5, rtol=1e-5)
    for cut in (0, 3, 32, 47, 64, 99):
        if chosen_kind() == "cpu":
            assert all(map(torch.equal, rows.alone(cut, **seen), together))
        else:
            torch.testing.assert_close(rows.alone(cut, **seen), together, atol=1e-5, rtol=1e-5)


def test_a_row_reads_what_another_writes_in_the_same_forward() -> None:
    rows = Rows(4, 2, 16, 16, block_size=4)
    longest = LENGTHS.index(max(LENGTHS))
    [whole] = rows.attend((longest, 0, 100))
    rows.cache.free()
    rows.cache.resize([100])
    first, second = rows.attend((longest, 0, 60), (longest, 60, 100))
    assert torch.equal(torch.cat((first, second)), whole)


def test_what_was_read_counts_until_the_cache_is_freed(device: torch.device) -> None:
    cache, taken = PagedCache(CacheShape(1, 4, 2, 8, 6, torch.float32), device), []
    for num_blocks in (9, 0):
        cache.resize(num_blocks)
        taken.append(cache.num_bytes)
        if num_blocks:
            keys, values = cache.read(0, torch.tensor([[1, 2], [3, 8]], device=device))
            taken.append(cache.num_bytes)
    blocks = 9 * cache.shape.block_bytes
    assert taken == [blocks, blocks + keys.nbytes + values.nbytes, 0]
