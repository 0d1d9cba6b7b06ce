"""What each rank of a node announces to the others: an append-only log of int64 messages in shared memory.

A journal has two halves, used in turn by successive batches (epochs). A half is one word that says what is published,
`epoch * 2^32 + words`, followed by the messages: length, then words. Writing that one word, which no reader can see
half of, publishes a message, and nothing but the writer of a half ever stores into it: no lock between processes, so a
rank that is killed at any point leaves no one waiting.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import ArrayLike

from spmdrl.dataflow.samples.store.shared_memory import JOURNAL_BYTES, Pool
from spmdrl.types import Integers

_HALF_WORDS = JOURNAL_BYTES // 8 // 2
_EPOCH_UNIT = 1 << 32

_fence_lock = threading.Lock()


def _fence() -> None:
    """Let no store or load from before this call be seen after one that follows it, on any processor."""
    # Unlocking orders what came before it, locking what comes after it, and the second locking follows the first
    # unlocking. One pair alone would let accesses from both sides meet inside of it.
    with _fence_lock:
        pass
    with _fence_lock:
        pass


class Journal:
    """One rank's log, and its reading of all logs of the node, its own included. Thread-safe."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._lock = threading.Lock()
        self._epoch: int | None = None
        self._halves: list[Integers] = []
        self._heads: list[memoryview] = []
        """each half's published word; a memoryview reads one word in a fraction of the time that an array takes"""
        self._seen: list[int] = []

    def begin(self, epoch: int) -> None:
        """Start on batch `epoch`, one more than the last. Messages about earlier ones aren't read any more.

        No rank may begin an epoch before all others have begun the one before it, since halves are reused.
        """
        assert self._epoch is None or epoch == self._epoch + 1, f"epoch {epoch} doesn't follow {self._epoch}"
        assert 0 <= epoch < _EPOCH_UNIT // 2, epoch
        with self._lock:
            start = epoch % 2 * _HALF_WORDS
            logs = [self._pool.journal_words(writer) for writer in range(self._pool.num_writers)]
            self._epoch = epoch
            self._halves = [log[start : start + _HALF_WORDS] for log in logs]
            self._heads = [half.data[:1] for half in self._halves]
            self._seen = [epoch * _EPOCH_UNIT] * len(logs)
            self._heads[self._pool.writer][0] = epoch * _EPOCH_UNIT

    def append(self, words: ArrayLike) -> None:
        """Publish a message [W] to all readers; a MemoryError where the batch's half is full."""
        message = np.asarray(words, dtype=np.int64)
        with self._lock:
            assert self._epoch is not None, "begin an epoch first"
            half, head = self._halves[self._pool.writer], self._heads[self._pool.writer]
            start = 1 + head[0] % _EPOCH_UNIT
            stop = start + 1 + message.size
            if stop > half.size:
                raise MemoryError(
                    f"a message of {message.size} words finds {half.size - start} words of the journal of "
                    f"{_HALF_WORDS} left in batch {self._epoch}; lower the rows of a step"
                )
            half[start] = message.size
            half[start + 1 : stop] = message
            _fence()
            head[0] = self._epoch * _EPOCH_UNIT + stop - 1

    def read_new(self) -> list[tuple[int, Integers]]:
        """All writers' messages of this epoch since the last call, as (writer, words), each writer's in its order."""
        news: list[tuple[int, Integers]] = []
        with self._lock:
            for writer, head in enumerate(self._heads):
                published = head[0]
                if published != self._seen[writer]:
                    news += [(writer, message) for message in self._read(writer, published)]
        return news

    def _read(self, writer: int, published: int) -> list[Integers]:
        assert self._epoch is not None, "heads are read between begin and the end"
        if published // _EPOCH_UNIT < self._epoch:  # The writer hasn't begun this epoch yet.
            return []
        _fence()
        start, stop = 1 + self._seen[writer] % _EPOCH_UNIT, 1 + published % _EPOCH_UNIT
        words = self._halves[writer][start:stop].copy()
        _fence()
        now = self._heads[writer][0] // _EPOCH_UNIT
        assert now == self._epoch, f"writer {writer} went on to epoch {now} while epoch {self._epoch} was being read"
        self._seen[writer] = published
        return _messages(words)


def _messages(words: Integers) -> list[Integers]:
    """Cut a run of messages apart."""
    messages, start = [], 0
    while start < words.size:
        stop = start + 1 + int(words[start])
        assert start < stop <= words.size, (start, stop, words.size)
        messages.append(words[start + 1 : stop])
        start = stop
    return messages
