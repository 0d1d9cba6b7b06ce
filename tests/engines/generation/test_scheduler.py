from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.engines.generation.paged import BlockPool
from spmdrl.engines.generation.protocol import Request, SamplingParams
from spmdrl.engines.generation.scheduler import Row, Scheduler

STOP = 9


def group(first_row: int, num_rows: int, prompt_length: int, max_tokens: int) -> Request:
    rows = tuple(range(first_row, first_row + num_rows))
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,))
    return Request(rows, (1,) * prompt_length, rows, sampling)


def give_token(scheduler: Scheduler, row: Row, token: int) -> bool:
    """Append a token as the engine does; returns whether the row ended."""
    row.token_ids.append(token)
    if row.finish:
        scheduler.finish(row)
    return row.finish is not None


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


requests_strategy = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(
    shapes=requests_strategy,
    block_size=st.integers(1, 5),
    slots=st.integers(1, 6),
    spare=st.integers(0, 12),
    data=st.data(),
)
def test_every_row_runs_once_owns_what_it_writes_and_all_blocks_come_back(shapes, block_size, slots, spare, data):
    starts = [sum(shape[0] for shape in shapes[:index]) for index in range(len(shapes))]
    requests = [group(start, *shape) for start, shape in zip(starts, shapes, strict=True)]
    pool = BlockPool()
    scheduler = Scheduler(pool, block_size, slots)
    least = max(Scheduler(BlockPool(), block_size, 1).blocks_wanted([request]) for request in requests)
    pool.grow(least + spare)
    scheduler.submit(requests)
    ended: list[int] = []
    prompts_run = 0
    while scheduler.num_unfinished:
        admissions = scheduler.admit()
        prompts_run += sum(admission.runs_prompt for admission in admissions)
        for row in [row for admission in admissions for row in admission.rows]:
            assert len(row.table) * block_size >= len(row.request.prompt_ids)
            if give_token(scheduler, row, data.draw(st.sampled_from([1, STOP]))):
                ended.append(row.row)
        assert len(scheduler.running) <= slots
        copies = scheduler.make_room()
        assert not set(copies.targets) & set(copies.sources)
        written = [row.table[(row.length - 1) // block_size] for row in scheduler.running.values()]
        assert len(set(written)) == len(written) and not any(map(pool.is_shared, written))
        assert pool.num_free >= sum(row.num_reserved for row in scheduler.running.values())
        for row in list(scheduler.running.values()):
            if give_token(scheduler, row, data.draw(st.sampled_from([1, 1, STOP]))):
                ended.append(row.row)
    assert sorted(ended) == [row for request in requests for row in request.rows]
    assert prompts_run == len(requests)
    assert pool.num_free == pool.num_blocks - 1 and scheduler.num_committed_blocks == 1


@settings(deadline=None, max_examples=50)
@given(shapes=requests_strategy, block_size=st.integers(1, 5), slots=st.integers(1, 6))
def test_the_wanted_blocks_let_the_longest_rows_run_at_once(shapes, block_size, slots):
    starts = [sum(shape[0] for shape in shapes[:index]) for index in range(len(shapes))]
    requests = [group(start, *shape) for start, shape in zip(starts, shapes, strict=True)]
    pool = BlockPool()
    scheduler = Scheduler(pool, block_size, slots)
    pool.grow(scheduler.blocks_wanted(requests))
    scheduler.submit(requests)
    if sum(shape[0] for shape in shapes) <= slots:
        assert sum(len(admission.rows) for admission in scheduler.admit()) == sum(shape[0] for shape in shapes)
    else:
        assert scheduler.admit()


def test_abort_returns_running_and_waiting_rows_and_frees_all():
    pool = BlockPool(13)
    scheduler = Scheduler(pool, 4, max_running_rows=3)
    scheduler.submit([group(0, 2, 6, 8), group(2, 4, 5, 8)])
    for admission in scheduler.admit():
        for row in admission.rows:
            give_token(scheduler, row, 1)
    scheduler.make_room()
    responses = scheduler.abort()
    assert [len(response.token_ids) for response in responses] == [1, 1, 1, 0, 0, 0]
    assert {response.finish for response in responses} == {"aborted"}
    assert scheduler.num_unfinished == 0 and pool.num_free == 12 and scheduler.num_committed_blocks == 1


def test_a_row_that_never_fits_is_refused_with_the_numbers():
    scheduler = Scheduler(BlockPool(4), block_size=4, max_running_rows=2)
    with pytest.raises(
        ValueError, match=r"row 7 can need 5 KV blocks \(9 prompt \+ 8 new tokens in blocks of 4\).* has 3"
    ):
        scheduler.submit([group(0, 1, 1, 1), group(7, 1, 9, 8)])
    assert scheduler.num_unfinished == 0


def test_a_row_cannot_be_submitted_twice():
    scheduler = Scheduler(BlockPool(20), block_size=4, max_running_rows=2)
    scheduler.submit([group(0, 2, 3, 3)])
    with pytest.raises(ValueError, match="row 1 is submitted twice"):
        scheduler.submit([group(1, 1, 3, 3)])
