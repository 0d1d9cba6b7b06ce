from __future__ import annotations

import pytest

from spmdrl.engines.generation.native.row_memory import RowMemory
from spmdrl.engines.generation.native.running_rows import Admission, Row, groups_of
from spmdrl.engines.generation.native.scheduler import Scheduler
from spmdrl.engines.generation.protocol import PartialResponse, Request
from spmdrl.engines.models.mixers import StateKind
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from tests.support.tuned import TunedRollout

STOP = 9


def group(first_row: int, num_rows: int, prompt: int | tuple[int, ...], max_tokens: int) -> Request:
    rows = tuple(range(first_row, first_row + num_rows))
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,))
    return Request(rows, (1,) * prompt if isinstance(prompt, int) else prompt, rows, sampling)


def scheduler_of(num_blocks: int, block_size: int, slots: int, prefill: int = 100, shares: bool = True) -> Scheduler:
    """A scheduler of a model with full attention alone."""
    memory = RowMemory([StateKind()], [num_blocks], block_size)
    return Scheduler(memory, limits(block_size, slots, prefill), shares_prefixes=shares)


def num_free(scheduler: Scheduler) -> int:
    return scheduler._memory.pools[0].num_free


def limits(block_size: int, slots: int, prefill: int) -> RolloutConfig:
    return TunedRollout(block_size=block_size, max_running_rows=slots, max_prefill_tokens=prefill)


def give_token(scheduler: Scheduler, row: Row, token: int) -> bool:
    """Append a token as the engine does; returns whether the row ended."""
    row.token_ids.append(token)
    row.logprobs.append(-1.0)
    row.versions.append(0)
    if row.finish:
        scheduler.finish(row)
    return row.finish is not None


def start(scheduler: Scheduler, token: int = 1) -> list[Admission]:
    """Admit, and give each row that starts a token."""
    admissions = scheduler.admit().admissions
    for row in [row for admission in admissions for row in admission.rows]:
        give_token(scheduler, row, token)
    return admissions


def test_without_blocks_the_newest_row_is_preempted_and_starts_again_with_its_tokens():
    scheduler = scheduler_of(6, block_size=2, slots=4, shares=False)
    scheduler.submit([group(0, 1, 2, 9), group(1, 1, 2, 9)])
    start(scheduler)
    assert list(scheduler.running) == [0, 1]
    for _ in range(3):
        scheduler.make_room()
        for row in list(scheduler.running.values()):
            give_token(scheduler, row, 2)
    assert list(scheduler.running) == [0]
    [older] = scheduler.running.values()
    assert not scheduler.admit().chunks
    while len(older.token_ids) < 9:
        scheduler.make_room()
        give_token(scheduler, older, 2)
    admitted = scheduler.admit()
    [chunk], [again] = admitted.chunks, admitted.admissions
    assert (chunk.start, chunk.stop, chunk.is_last) == (0, 5, True)
    assert chunk.group.token_ids == (1, 1, 1, 2, 2) and again.rows[0].row == 1


def test_a_long_prompt_comes_in_chunks_and_later_ones_wait_for_it():
    scheduler = scheduler_of(20, block_size=4, slots=4, prefill=5)
    scheduler.submit([group(0, 1, 3, 4), group(1, 1, (2,) * 11, 4), group(2, 1, (3, 3), 4)])
    seen = []
    for _ in range(3):
        admitted = scheduler.admit()
        chunks = [(chunk.group.rows[0].row, chunk.start, chunk.stop) for chunk in admitted.chunks]
        seen.append((chunks, [admission.rows[0].row for admission in admitted.admissions]))
        for row in scheduler.running.values():
            row.token_ids.append(1)
    assert seen == [([(0, 0, 3), (1, 0, 2)], [0]), ([(1, 2, 7)], []), ([(1, 7, 11), (2, 0, 1)], [1])]


def test_groups_share_the_full_blocks_of_equal_tokens_and_compute_the_rest():
    scheduler = scheduler_of(30, block_size=2, slots=9)
    scheduler.submit(
        [group(0, 2, (1, 2, 3, 4, 5), 3), group(2, 1, (1, 2, 3, 4, 6, 7), 3), group(3, 1, (1, 3, 3, 4), 3)]
    )
    chunks = scheduler.admit().chunks
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(0, 5), (4, 6), (0, 4)]
    assert chunks[0].group.tables[0][:2] == chunks[1].group.tables[0][:2]
    scheduler.make_room()
    scheduler.abort()
    assert num_free(scheduler) == 29


def test_a_last_token_is_always_computed_even_if_all_blocks_are_known():
    scheduler = scheduler_of(30, block_size=2, slots=9)
    scheduler.submit([group(0, 1, (1, 2, 3, 4), 3), group(1, 1, (1, 2, 3, 4), 3)])
    assert [(chunk.start, chunk.stop) for chunk in scheduler.admit().chunks] == [(0, 4), (2, 4)]


def test_prefixes_are_known_after_their_rows_ended_until_they_are_forgotten():
    scheduler = scheduler_of(30, block_size=2, slots=9)
    starts = []
    for first_row in range(3):
        scheduler.submit([group(first_row, 1, (1, 2, 3, 4, 5), 1)])
        starts.append(scheduler.admit().chunks[0].start)
        give_token(scheduler, scheduler.running[first_row], 1)
        if first_row == 1:
            scheduler.forget_prefixes()
    assert starts == [0, 4, 0]


def test_a_prompt_half_computed_under_other_weights_is_computed_anew():
    scheduler = scheduler_of(30, block_size=2, slots=9, prefill=3)
    scheduler.submit([group(0, 1, (1, 2, 3, 4, 5), 3)])
    assert scheduler.admit().chunks[0].stop == 3
    scheduler.forget_prefixes()
    assert [(chunk.start, chunk.stop) for chunk in scheduler.admit().chunks] == [(0, 3)]


def test_a_row_goes_on_from_the_tokens_that_it_brings():
    scheduler = scheduler_of(30, block_size=2, slots=9)
    brought = PartialResponse((4, 5), (-0.5, -0.25), (7, 8))
    request = group(0, 3, (1, 2, 3), 4)
    partial = (PartialResponse((), (), ()), brought, PartialResponse((), (), ()))
    request = Request(request.rows, request.prompt_ids, request.seeds, request.sampling, partial)
    assert [[row.row for row in part.rows] for part in groups_of(request)] == [[1], [0, 2]]
    scheduler.submit([request])
    start(scheduler, token=6)
    [resumed, *_] = scheduler.abort()
    assert (resumed.row, resumed.token_ids, resumed.versions) == (1, (4, 5, 6), (7, 8, 0))
    assert resumed.logprobs == (-0.5, -0.25, -1.0)


def test_a_row_that_has_ended_is_refused():
    request = group(3, 1, 4, 2)
    ended = PartialResponse((1, 1), (-1.0, -1.0), (0, 0))
    scheduler = scheduler_of(30, block_size=2, slots=9)
    with pytest.raises(ValueError, match=r"row 3 has ended \(length\)"):
        scheduler.submit([Request((3,), (1,), (3,), request.sampling, (ended,))])
    assert scheduler.num_unfinished == 0


def test_abort_returns_running_and_waiting_rows_and_frees_all():
    scheduler = scheduler_of(13, 4, slots=3)
    scheduler.submit([group(0, 2, 6, 8), group(2, 4, 5, 8)])
    start(scheduler)
    scheduler.make_room()
    responses = scheduler.abort()
    assert [len(response.token_ids) for response in responses] == [1, 1, 1, 0, 0, 0]
    assert {response.finish for response in responses} == {"aborted"}
    assert scheduler.num_unfinished == 0 and num_free(scheduler) == 12


def test_a_row_that_never_fits_is_refused_with_the_numbers():
    scheduler = scheduler_of(4, block_size=4, slots=2)
    with pytest.raises(
        ValueError, match=r"row 7 can need 4 KV blocks \(9 prompt \+ 8 new tokens in blocks of 4\).* has 3"
    ):
        scheduler.submit([group(0, 1, 1, 1), group(7, 1, 9, 8)])
    assert scheduler.num_unfinished == 0


def test_a_row_cannot_be_submitted_twice():
    scheduler = scheduler_of(20, block_size=4, slots=2)
    scheduler.submit([group(0, 2, 3, 3)])
    with pytest.raises(ValueError, match="row 1 is submitted twice"):
        scheduler.submit([group(1, 1, 3, 3)])
