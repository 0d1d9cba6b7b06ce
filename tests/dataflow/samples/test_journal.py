from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.store.journal import Journal
from spmdrl.dataflow.samples.store.shared_memory import JOURNAL_BYTES, Pool, host_pool


def journals(num_writers: int) -> list[Journal]:
    host = host_pool(num_writers, 1 << 20)
    opened = [Journal(Pool(host.address, writer)) for writer in range(num_writers)]
    host.forget_names()
    return opened


def read(journal: Journal) -> list[tuple[int, list[int]]]:
    return [(writer, words.tolist()) for writer, words in journal.read_new()]


messages = st.tuples(st.just("append"), st.integers(0, 2), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
readings = st.tuples(st.just("read"), st.integers(0, 2), st.none())
next_epochs = st.tuples(st.just("next"), st.none(), st.none())


@given(st.lists(st.one_of(messages, readings, next_epochs), max_size=40), st.integers(0, 1000))
def test_every_rank_reads_all_messages_of_its_epoch_once_and_in_order(steps, epoch):
    logs = journals(3)
    told: list[list[list[int]]] = [[], [], []]
    heard = [[0, 0, 0] for _ in logs]
    for log in logs:
        log.begin(epoch)
    for kind, who, words in steps:
        if kind == "append":
            logs[who].append(words)
            told[who].append(words)
        elif kind == "read":
            expected = [(writer, said) for writer in range(3) for said in told[writer][heard[who][writer] :]]
            assert read(logs[who]) == expected
            heard[who] = [len(said) for said in told]
        else:
            epoch += 1
            told, heard = [[], [], []], [[0, 0, 0] for _ in logs]
            for log in logs:
                log.begin(epoch)


def test_before_the_first_epoch_there_is_nothing_to_read():
    (log,) = journals(1)
    assert log.read_new() == []


def test_a_rank_may_be_one_epoch_ahead_of_its_readers():
    fast, slow = journals(2)
    for log in (fast, slow):
        log.begin(0)
    fast.append([1])
    fast.begin(1)
    fast.append([2])
    assert read(slow) == [(0, [1])]
    slow.append([3])
    assert read(fast) == [(0, [2])]
    slow.begin(1)
    assert read(slow) == [(0, [2])]


def test_what_was_read_stays_when_its_memory_is_written_again():
    (log,) = journals(1)
    log.begin(0)
    log.append([1, 2])
    ((_, words),) = log.read_new()
    for epoch in (1, 2):
        log.begin(epoch)
        log.append([7, 7])
    assert words.tolist() == [1, 2]


def test_a_reader_two_epochs_late_notices_it():
    fast, slow = journals(2)
    for log in (fast, slow):
        log.begin(0)
    for epoch in (1, 2):
        fast.begin(epoch)
    with pytest.raises(AssertionError, match="writer 0 went on to epoch 2 while epoch 0 was being read"):
        slow.read_new()


def test_epochs_follow_one_another():
    (log,) = journals(1)
    log.begin(3)
    with pytest.raises(AssertionError, match="epoch 5 doesn't follow 3"):
        log.begin(5)


def test_a_full_journal_says_so_and_keeps_what_it_has():
    (log,) = journals(1)
    log.begin(0)
    log.append([1])
    with pytest.raises(MemoryError, match="lower the rows of a step"):
        log.append(np.zeros(JOURNAL_BYTES // 16, dtype=np.int64))
    assert read(log) == [(0, [1])]


NUM_MESSAGES = 20_000


def message(epoch: int, number: int) -> np.ndarray:
    """Words that tell whether they are whole and where they belong."""
    return np.full(number % 7, epoch * NUM_MESSAGES + number, dtype=np.int64)


def write_messages(pipe: Connection, address: bytes) -> None:
    log = Journal(Pool(address, 1))
    for epoch in range(3):
        log.begin(epoch)
        pipe.send("begun")
        for number in range(NUM_MESSAGES):
            log.append(message(epoch, number))
        pipe.recv()


@pytest.mark.ranks
def test_messages_of_another_process_arrive_whole_in_order_and_in_their_epoch():
    host = host_pool(2, 1 << 20)
    log = Journal(Pool(host.address, 0))
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=write_messages, args=(other, host.address), daemon=True)
    process.start()
    try:
        for epoch in range(3):
            log.begin(epoch)
            log.append([epoch])
            assert pipe.poll(60) and pipe.recv() == "begun"
            received = listen(log)
            own = [words.tolist() for writer, words in received if writer == 0]
            theirs = [words for writer, words in received if writer == 1]
            assert own == [[epoch]]
            assert all(np.array_equal(words, message(epoch, number)) for number, words in enumerate(theirs))
            assert len(theirs) == NUM_MESSAGES
            pipe.send("next")
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def listen(log: Journal) -> list[tuple[int, np.ndarray]]:
    """Poll until both writers' messages of the epoch are there; at most 30 seconds."""
    received: list[tuple[int, np.ndarray]] = []
    deadline = time.monotonic() + 30
    while len(received) < 1 + NUM_MESSAGES and time.monotonic() < deadline:
        received += log.read_new()
    return received
