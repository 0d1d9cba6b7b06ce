"""Blocks are held, shared, remembered and handed out."""

from __future__ import annotations

from spmdrl.engines.generation.native.paged import BlockPool


def test_blocks_are_given_once_and_come_back():
    pool = BlockPool(4)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3] and pool.num_free == 0
    pool.share(taken[:1])
    pool.release(taken)
    assert pool.num_free == 2 and not pool.is_shared(taken[0])
    pool.release(taken[:1])
    assert pool.num_free == 3


def test_a_pool_that_grows_keeps_what_is_taken():
    pool = BlockPool(2)
    block = pool.take()
    pool.grow(5)
    assert pool.num_free == 3
    assert block not in [pool.take() for _ in range(3)]


def test_remembered_blocks_are_handed_out_last_and_the_longest_idle_first():
    pool = BlockPool(5)
    first, second, third = (pool.take() for _ in range(3))
    fills = [pool.remember(block) for block in (first, second)]
    pool.release([first])
    pool.release([second, third])
    assert pool.num_free == 4 and not pool.is_held(first)
    assert {pool.take(), pool.take()} == {third, 4}
    assert [pool.fill_of(block) for block in (first, second)] == fills
    pool.share([second])
    assert pool.take() == first and pool.fill_of(first) != fills[0]
    assert pool.num_free == 0 and pool.is_held(second)
