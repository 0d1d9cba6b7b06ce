"""Any requests, in any cache that holds the longest row: every row finds its context, in turn, and no block is lost."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmdrl.engines.generation.native.paged import SCRATCH_BLOCK
from spmdrl.engines.generation.native.row_memory import BlockCopies, BlockCounts, RowMemory, fits
from spmdrl.engines.generation.native.running_rows import Row, Tables
from spmdrl.engines.generation.native.scheduler import Scheduler
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.mixers import StateKind
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from tests.engines.generation.test_scheduler import STOP, give_token, group, limits, scheduler_of


class Engine:
    """Steps a scheduler over a cache of which each place holds the tokens up to its own: its whole context."""

    def __init__(self, memory: RowMemory, scheduler: Scheduler, limits: RolloutConfig, draw):
        self.memory, self.scheduler, self.limits, self.draw = memory, scheduler, limits, draw
        self.places: dict[tuple[int, int, int], tuple[int, ...]] = {}
        """By kind of state, block and place in it; a slot has one place."""
        self.ended: list[int] = []
        self.num_prefilled = self.num_preempted = self.num_fed = 0

    def step(self) -> None:
        admitted = self.scheduler.admit()
        assert sum(chunk.num_tokens for chunk in admitted.chunks) <= self.limits.max_prefill_tokens
        for chunk in admitted.chunks:
            assert chunk.num_tokens > 0
            self.write(chunk.group.tables, chunk.group.token_ids, chunk.start, chunk.stop)
        for chunk in admitted.chunks:
            self.check(chunk.group.tables, chunk.group.token_ids[: chunk.stop], chunk.num_tokens)
            self.num_prefilled += chunk.num_tokens
        self.copy(admitted.copies)
        for admission in admitted.admissions:
            for row in admission.rows:
                self.check(row.tables, tokens_of(row))
            self.take_tokens(admission.rows)
        assert len(self.scheduler.running) <= self.limits.max_running_rows
        self.decode()

    def decode(self) -> None:
        before = list(self.scheduler.running)
        self.copy(self.scheduler.make_room())
        rows = list(self.scheduler.running.values())
        # Those that no longer run are the newest.
        assert [row.row for row in rows] == before[: len(rows)]
        self.num_preempted += len(before) - len(rows)
        fed = [row for row in rows if row.is_first]
        self.num_fed += len(fed)
        for kind, pool in enumerate(self.memory.pools):
            written = [row.tables[kind][self.block(kind, row.length - 1)] for row in fed]
            assert len(set(written)) == len(written) and not any(map(pool.is_shared, written))
        for row in fed:
            self.write(row.tables, tokens_of(row), row.length - 1, row.length)
        for row in rows:
            self.check(row.tables, tokens_of(row))
        self.take_tokens(rows)

    def block(self, kind: int, position: int) -> int:
        return 0 if self.memory.kinds[kind].is_slot else position // self.limits.block_size

    def place(self, kind: int, tables: Tables, position: int) -> tuple[int, int, int]:
        place = 0 if self.memory.kinds[kind].is_slot else position % self.limits.block_size
        return kind, tables[kind][self.block(kind, position)], place

    def copy(self, copies: list[BlockCopies]) -> None:
        for kind, pairs in enumerate(copies):
            assert len(set(pairs.targets)) == len(pairs.targets)
            size = self.limits.block_size
            read = [[self.places.get((kind, source, place)) for place in range(size)] for source in pairs.sources]
            for target, contexts in zip(pairs.targets, read, strict=True):
                found = {place: context for place, context in enumerate(contexts) if context is not None}
                self.places |= {(kind, target, place): context for place, context in found.items()}

    def write(self, tables: Tables, tokens: tuple[int, ...], start: int, stop: int) -> None:
        for kind, of_kind in enumerate(self.memory.kinds):
            for position in range(start, stop):
                place = self.place(kind, tables, position)
                assert place[1] != SCRATCH_BLOCK
                if of_kind.is_slot and position:
                    assert self.places[place] == tokens[:position]
                self.places[place] = tokens[: position + 1]

    def check(self, tables: Tables, tokens: tuple[int, ...], num_new: int = 1) -> None:
        """Whether all that the newest tokens see is there."""
        for kind, of_kind in enumerate(self.memory.kinds):
            oldest = 0 if of_kind.window is None else max(0, len(tokens) - num_new - of_kind.window + 1)
            for position in [len(tokens) - 1] if of_kind.is_slot else range(oldest, len(tokens)):
                assert self.places[self.place(kind, tables, position)] == tokens[: position + 1]
            if of_kind.window is not None and num_new == 1 and self.num_fed:
                num_held = sum(block != SCRATCH_BLOCK for block in tables[kind])
                assert num_held <= -(-(of_kind.window + self.limits.max_prefill_tokens) // self.limits.block_size) + 1

    def take_tokens(self, rows: list[Row]) -> None:
        self.ended += [row.row for row in rows if give_token(self.scheduler, row, self.draw())]
        self.copy(self.scheduler.fork(rows))
        # A branch is all rows of an admission that have drawn the same ever since.
        for row in self.scheduler.running.values():
            assert row.branch is not None and row in row.branch.rows
            assert {tokens_of(other) for other in row.branch.rows} == {tokens_of(row)}


def tokens_of(row: Row) -> tuple[int, ...]:
    return (*row.request.prompt_ids, *row.token_ids)


FULL, WINDOW, WIDE, SLOT = StateKind(), StateKind(window=2), StateKind(window=5), StateKind(is_slot=True)
prompt_strategy = st.lists(st.integers(1, 2), min_size=1, max_size=9).map(tuple)
shapes_strategy = st.lists(st.tuples(st.integers(1, 5), prompt_strategy, st.integers(1, 7)), min_size=1, max_size=6)


def requests_of(shapes) -> list[Request]:
    starts = [sum(shape[0] for shape in shapes[:index]) for index in range(len(shapes))]
    return [group(start, *shape) for start, shape in zip(starts, shapes, strict=True)]


@settings(deadline=None, max_examples=400)
@given(
    shapes=shapes_strategy,
    late=st.integers(0, 3),
    block_size=st.integers(1, 5),
    slots=st.integers(1, 6),
    prefill=st.integers(1, 12),
    shares=st.booleans(),
    merges=st.booleans(),
    spare=st.integers(0, 8),
    kinds=st.sampled_from([(FULL,), (FULL, WINDOW), (WINDOW,), (FULL, SLOT), (WINDOW, WIDE, SLOT), (SLOT,)]),
    data=st.data(),
)
def test_rows_find_their_context_end_in_turn_and_leak_no_block(
    shapes, late, block_size, slots, prefill, shares, merges, spare, kinds, data
):
    requests, rollout = requests_of(shapes), limits(block_size, slots, prefill)
    # Room for the longest row alone.
    most = [BlockCounts.of(kinds, rollout).most(request) for request in requests]
    num_blocks = [1 + max(counts) + spare for counts in zip(*most, strict=True)]
    memory = RowMemory(kinds, num_blocks, block_size)
    scheduler = Scheduler(memory, rollout, shares_prefixes=shares, merges_rows=merges)
    is_ample = fits(scheduler.blocks_wanted(requests), memory.num_blocks) and slots >= sum(shape[0] for shape in shapes)
    engine = Engine(memory, scheduler, rollout, lambda: data.draw(st.sampled_from([1, 1, 2, STOP])))
    later = requests[len(requests) - min(late, len(requests) - 1) :]
    scheduler.submit(requests[: len(requests) - len(later)])
    order = [row for request in requests for row in request.rows]
    num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    for step in range(4 * len(order) * (10 + num_prompt_tokens)):
        if later and step % 3 == 2:
            scheduler.submit([later.pop(0)])
        if not scheduler.num_unfinished:
            if not later:
                break
            continue
        oldest = min(set(order) - set(engine.ended), key=order.index)
        before = (progress_of(scheduler, oldest), engine.num_prefilled)
        engine.step()
        # First come, first served: whatever runs is older than whatever waits, and the oldest gets on in each step.
        running = [order.index(row) for row in scheduler.running]
        waiting = [order.index(row.row) for waits in scheduler._waiting for row in waits.rows]
        assert running == sorted(running) and max(running, default=-1) < min(waiting, default=len(order))
        assert oldest in engine.ended or before != (progress_of(scheduler, oldest), engine.num_prefilled)
    assert sorted(engine.ended) == order
    assert memory.num_free == [count - 1 for count in num_blocks]
    if is_ample:
        assert engine.num_prefilled <= num_prompt_tokens and not engine.num_preempted


def progress_of(scheduler: Scheduler, row: int) -> int:
    """Tokens that the row has, or -1 while it waits."""
    return len(scheduler.running[row].token_ids) if row in scheduler.running else -1


def test_a_row_that_was_preempted_in_the_room_of_one_starts_again():
    rollout, kinds = limits(1, 2, 5), (FULL, WINDOW)
    counts, request = BlockCounts.of(kinds, rollout), group(0, 2, (1,) * 6, 5)
    memory = RowMemory(kinds, [1 + count for count in counts.most(request)], 1)
    # Of different tokens, so that each row has blocks of its own.
    drawn = iter([1, 2] * 20)
    engine = Engine(memory, Scheduler(memory, rollout), rollout, lambda: next(drawn))
    engine.scheduler.submit([request])
    for _ in range(60):
        if engine.scheduler.num_unfinished:
            engine.step()
    assert sorted(engine.ended) == [0, 1] and engine.num_preempted


@settings(deadline=None, max_examples=50)
@given(shapes=shapes_strategy, block_size=st.integers(1, 5), slots=st.integers(1, 6))
# Rows of one token, which take no block beside their prompt's, before others that do.
@example(shapes=[(2, (2,), 1), (1, (1,), 4)], block_size=3, slots=3)
def test_the_wanted_blocks_let_the_longest_rows_run_at_once(shapes, block_size, slots):
    requests, scheduler = requests_of(shapes), scheduler_of(1, block_size, slots)
    scheduler._memory.grow(scheduler.blocks_wanted(requests))
    scheduler.submit(requests)
    num_started = sum(len(admission.rows) for admission in scheduler.admit().admissions)
    if sum(shape[0] for shape in shapes) <= slots:
        assert num_started == sum(shape[0] for shape in shapes)
    else:
        assert num_started
