"""The watchdog of a rank: threads that find out when the job stands still, name who holds it up, and end it.

    every rank   beat: what it is at -> the job's store          looks there whether the job hangs
    rank 0       reads all beats -> decides -> one line in the store
    the others   decide by themselves where no beat of rank 0 comes any more, which keeps the store, and each about
                 itself once rank 0 has ended
    C's own      timer of `faulthandler`: writes stacks and ends a process in which no thread of Python runs

No collective is involved, and nothing of it runs in the threads that work.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.supervision.ending import FirstFailure
from spmdrl.runtime.supervision.fence import loss_of_folder
from spmdrl.runtime.supervision.first_failure import publish
from spmdrl.runtime.supervision.hang_report import HUNG, hang_line, silent_main_line, stacks_file, write_stacks
from spmdrl.runtime.supervision.launcher import process_state
from spmdrl.runtime.supervision.main_thread import RankState, culprits, is_debugged, state_of_this

_HANG, _WRITTEN, _BEAT = "hang", "hang/written", "beat/"
_GONE = "gone"
# Beats in the time that a rank may take.
_BEATS_PER_LIMIT = 20
_LONGEST_BEAT_SECONDS = 10.0
# Beyond so many ranks each looks less often: all of them read from rank 0.
_POLL_SECONDS, _RANKS_PER_POLL = 0.5, 500
# In which the others write their stacks: with rank 0 the store ends, and the launcher stops those that still run.
_OTHERS_SECONDS = 5.0
# In which the main rank may write the report of the run.
_REPORT_SECONDS = 5.0

OnHang = Callable[[str, Path | None], None]
"""Shows and records the line about a hang, and where this rank's stacks are."""


@dataclass(frozen=True)
class WatchConfig:
    """What a watchdog watches."""

    limit_seconds: float
    """for which a rank may make no progress"""
    folder: Path
    """the run's"""
    rank: int
    size: int
    ranks_per_node: int = 0
    """0 in a job of one node"""
    host: str = ""
    """name and address of this node, in a job of several"""

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank shows, on a node that rank 0 isn't on, what ends the job."""
        return self.ranks_per_node > 0 and self.rank % self.ranks_per_node == 0

    @property
    def beat_seconds(self) -> float:
        return min(self.limit_seconds / _BEATS_PER_LIMIT, _LONGEST_BEAT_SECONDS)

    @property
    def poll_seconds(self) -> float:
        """Between looks for others' verdict: much less than rank 0 waits for those who look."""
        return min(self.beat_seconds, max(_POLL_SECONDS, _POLL_SECONDS * self.size / _RANKS_PER_POLL))

    def suspended_seconds(self, since_last_seconds: float) -> float:
        """For how long this process was suspended, if the thread that beats came back after so long."""
        seconds = since_last_seconds - self.beat_seconds
        return seconds if seconds > max(1.0, self.limit_seconds / 4) else 0.0


class Beats:
    """The beats of all ranks as rank 0 finds them in the store."""

    def __init__(self, store: dist.Store, config: WatchConfig):
        self._store = store
        self._config = config
        self._read_at = time.monotonic()
        self._missing = set(range(config.size))
        self._last: dict[int, tuple[str, float]] = {}
        """by rank, its last beat, and when that was new here"""

    def read(self) -> None:
        """Take what is new."""
        self._missing -= {rank for rank in self._missing if self._store.check([f"{_BEAT}{rank}"])}
        known = [rank for rank in range(self._config.size) if rank not in self._missing]
        texts = self._store.multi_get([f"{_BEAT}{rank}" for rank in known]) if known else []
        now = time.monotonic()
        # No rank is silent for a time in which this process itself stood still.
        forgiven = self._config.suspended_seconds(now - self._read_at)
        self._read_at = now
        for rank, text in zip(known, texts, strict=True):
            beat, (before, when) = text.decode(), self._last.get(rank, ("", now))
            self._last[rank] = beat, when + forgiven if beat == before else now
        for rank in [rank for rank, (beat, _) in self._last.items() if beat == _GONE]:
            del self._last[rank]

    def states(self) -> list[RankState]:
        """What the ranks are at that are here."""
        return [RankState(**json.loads(beat)["state"]) for beat, _ in self._last.values()]

    def silent(self) -> dict[int, float]:
        """For how many seconds nothing came from each of them."""
        now = time.monotonic()
        return {rank: now - when for rank, (_, when) in self._last.items()}


class MainsBeat:
    """The newest beat of rank 0 as another rank finds it in the store."""

    def __init__(self, store: dist.Store):
        self._store = store
        self._text = ""
        self.came_at = time.monotonic()
        self.has_ended = False
        """whether rank 0 watches no longer"""

    def read(self) -> None:
        """Take it if it is new."""
        if not self._store.check([f"{_BEAT}0"]):
            return
        if (text := self._store.get(f"{_BEAT}0").decode()) != self._text:
            self._text, self.came_at, self.has_ended = text, time.monotonic(), text == _GONE

    def state(self) -> RankState | None:
        """What rank 0 was at, if it ever wrote it."""
        return RankState(**json.loads(self._text)["state"]) if self._text not in ("", _GONE) else None


class HangWatch:
    """Watches this rank and, on rank 0, the others."""

    def __init__(
        self, config: WatchConfig, store: dist.Store | None, on_hang: OnHang, peers: Mapping[int, int] | None = None
    ):
        """Without a store, as in a job of one rank, the rank decides alone. `peers`: processes of this node by rank."""
        self._peers = peers or {}
        self._config = config
        self._store = store
        self._on_hang = on_hang
        self._beats = Beats(store, config) if store is not None and config.rank == 0 else None
        self._main = MainsBeat(store) if store is not None and config.rank != 0 else None
        self._ended = threading.Event()
        self._deciding = threading.Lock()
        self._progress = -1
        now = time.monotonic()
        self._progressed_at = self._looked_at = now
        self._num_beats = 0
        self._beaten_at = -math.inf
        self._stacks: TextIO | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch within the block."""
        if self._config.limit_seconds == 0:
            yield
            return
        targets = [self._watch] + ([self._exchange] if self._store is not None else [])
        threads = [threading.Thread(target=target, name="hang-watch", daemon=True) for target in targets]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            faulthandler.cancel_dump_traceback_later()
            for thread in threads:
                # The store may never answer.
                thread.join(1.0)
            self._close_stacks()

    def _open_stacks(self) -> None:
        """Open the file for C's timer; with the first stage the run's folder is this run's."""
        if activity.num_boundaries == 0 or self._stacks is not None or loss_of_folder():
            return
        path = stacks_file(self._config.folder, self._config.rank)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def _close_stacks(self) -> None:
        if self._stacks is None:
            return
        self._stacks.close()
        path = Path(self._stacks.name)
        with suppress(OSError):
            if path.stat().st_size == 0 and not loss_of_folder():
                path.unlink()
                path.parent.rmdir()

    # This rank

    def _watch(self) -> None:
        config = self._config
        while not self._ended.wait(config.beat_seconds):
            self._look()
            self._open_stacks()
            if self._stacks is not None and not self._ended.is_set():
                seconds = config.limit_seconds * self._state().patience + 3 * config.beat_seconds + 1.0
                faulthandler.dump_traceback_later(seconds, file=self._stacks, exit=True)
            if self._store is None:
                self._decide([self._state()], {})
            elif self._main is not None and not self._ended.is_set():
                self._decide_alone() if self._main.has_ended else self._decide_on_main(self._main)

    def _decide_alone(self) -> None:
        """End this rank where rank 0 has ended and it still stands still: no other will decide that."""
        config, state = self._config, self._state()
        if culprits([state], {}, config.limit_seconds):
            line = hang_line([config.rank], [state], {}, config.limit_seconds)
            self._end(f"rank 0 has ended, and {line}", shows=True, has_store=False)

    def _decide_on_main(self, main: MainsBeat) -> None:
        """End this rank where rank 0, which decides else, hasn't answered for too long."""
        config, state = self._config, main.state()
        silent = time.monotonic() - main.came_at
        if silent > config.limit_seconds * (state.patience if state else 1.0) + config.beat_seconds:
            line = silent_main_line(self._state(), state, silent, config.limit_seconds)
            self._end(line, shows=config.rank == 1 or config.is_first_of_node, has_store=False)

    def _look(self) -> None:
        """Note whether this rank has got on; a time in which the process was suspended doesn't count."""
        now = time.monotonic()
        suspended = self._config.suspended_seconds(now - self._looked_at)
        self._progressed_at += suspended
        if self._main is not None:
            self._main.came_at += suspended
        self._looked_at = now
        if activity.progress != self._progress or is_debugged():
            self._progress, self._progressed_at = activity.progress, now

    def _state(self) -> RankState:
        return state_of_this(self._config.rank, time.monotonic() - self._progressed_at, self._config.host)

    # All ranks

    def _exchange(self) -> None:
        """Beat, and look for others' verdict; on rank 0 find it."""
        store, config = self._store, self._config
        assert store is not None
        try:
            while not self._ended.wait(config.poll_seconds if self._beats is None else config.beat_seconds):
                self._beat(store)
                if self._beats is not None:
                    self._beats.read()
                    self._decide(self._beats.states(), self._beats.silent())
                elif store.check([_HANG]):
                    # Launchers of different nodes have screens of their own.
                    self._end(store.get(_HANG).decode(), shows=config.is_first_of_node)
                if self._main is not None:
                    self._main.read()
            store.set(f"{_BEAT}{config.rank}", _GONE)
        except RuntimeError:
            # Rank 0, which keeps the store, has ended: what waits for it fails by itself.
            if self._main is not None:
                self._main.has_ended = True

    def _beat(self, store: dist.Store) -> None:
        """Write what this rank is at, once it is time for that."""
        now = time.monotonic()
        if now - self._beaten_at < self._config.beat_seconds:
            return
        self._beaten_at = now
        self._num_beats += 1
        beat = {"number": self._num_beats, "state": asdict(self._state())}
        store.set(f"{_BEAT}{self._config.rank}", json.dumps(beat))

    def _decide(self, states: list[RankState], silent: dict[int, float]) -> None:
        ranks = culprits(states, silent, self._config.limit_seconds)
        if not ranks or self._ended.is_set():
            return
        line = hang_line(ranks, states, silent, self._config.limit_seconds, self._config.ranks_per_node)
        if self._store is not None:
            publish(self._store, FirstFailure(ranks[0], line))
            self._store.set(_HANG, line)
        self._end(line, shows=True)

    def _end(self, line: str, *, shows: bool, has_store: bool = True) -> None:
        """Write this rank's stacks and end the process, whatever its main thread does."""
        with self._deciding:
            faulthandler.cancel_dump_traceback_later()
            # A file system over the network may never answer where a link is down.
            report = threading.Thread(target=self._report, args=(line, shows), daemon=True)
            report.start()
            report.join(_REPORT_SECONDS)
            if self._store is not None:
                with suppress(RuntimeError):
                    self._end_together(self._store if has_store else None)
            for pid in self._peers.values():
                # A stopped process ignores its launcher's SIGTERM, which then waits for half a minute.
                if process_state(pid) == "T":
                    os.kill(pid, signal.SIGKILL)
            os._exit(HUNG)

    def _report(self, line: str, shows: bool) -> None:
        if self._waits_in_vain() and activity.on_wedged is not None and not loss_of_folder():
            activity.on_wedged(line)
        written = write_stacks(self._config.folder, self._config.rank, line)
        if shows:
            self._on_hang(line, written)

    def _waits_in_vain(self) -> bool:
        """Whether this rank waits for calls, none of which got an answer for too long."""
        return activity.calls is not None and bool(culprits([self._state()], {}, self._config.limit_seconds))

    def _end_together(self, store: dist.Store | None) -> None:
        """Note that this rank's stacks are written; on rank 0, wait for those that the others write.

        The end of a rank closes connections, at which others would fail that haven't found the verdict yet.
        """
        config = self._config
        if store is None:
            time.sleep(config.beat_seconds + config.poll_seconds + 0.5)
        elif config.rank != 0:
            store.add(_WRITTEN, 1)
            time.sleep(2 * config.poll_seconds)
        else:
            deadline = time.monotonic() + _OTHERS_SECONDS
            while store.add(_WRITTEN, 0) < config.size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
