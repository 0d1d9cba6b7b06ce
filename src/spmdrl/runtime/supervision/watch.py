"""The watch of a rank: duties of the agent that publish its state, and end it if the job hangs.

The agent never waits for the store, which may be unresponsive: short threads exchange lines with it. The last resort is
C's timer of `faulthandler`: it writes stacks and ends a process in which no Python thread runs.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.supervision.agent import Duty, agent
from spmdrl.runtime.supervision.board import Board, Hang, Line, RankState, Stop, Verdict, culprits, decide
from spmdrl.runtime.supervision.ending import FirstFailure
from spmdrl.runtime.supervision.first_failure import FIRST, gone, publish
from spmdrl.runtime.supervision.hang_report import HUNG, hang_line, silent_main_line, stacks_file, write_stacks
from spmdrl.runtime.supervision.launcher import process_state
from spmdrl.runtime.supervision.main_thread import is_debugged, state_of_this
from spmdrl.runtime.supervision.stop_request import request

_LINE, _WRITTEN = "line/", "hang/written"
# Twice a second, more often with short limits, and less often with many ranks, as all of them poll rank 0.
_LOOK_SECONDS, _RANKS_PER_LOOK = 0.5, 500
_LOOKS_PER_LIMIT = 20
_LONGEST_SLACK_SECONDS = 10.0
# Time in which the others write their stacks: with rank 0 the store ends, and the launcher stops the remaining ranks.
_OTHERS_SECONDS = 5.0
# Time in which the main rank may write the report of the run.
_REPORT_SECONDS = 5.0
# For the last line of a rank that leaves.
_LEAVING_SECONDS = 1.0
# Time for which a rank may wait for others after one has failed: connections end sooner, except between devices.
_SURVIVOR_SECONDS = 20.0
# Time for which it may wait if a process of its node is gone: no connection ends where connections are being made.
_PEER_SECONDS = 10.0

OnHang = Callable[[str, Path | None, int], None]
"""Shows and records the line about a hang, the path of this rank's stacks, and the exit code."""


@dataclass(frozen=True)
class Deadline:
    """Time at which a job stops by itself."""

    time: float
    """in terms of `time.time`"""
    reason: str


@dataclass(frozen=True)
class WatchConfig:
    """Limits of a watch, and this rank's place in the job."""

    rank: int
    size: int
    limit_seconds: float = 0.0
    """longest time without progress; 0: no limit"""
    folder: Path = Path()
    """the run's folder"""
    ranks_per_node: int = 0
    """0 in a job of one node"""
    host: str = ""
    """name and address of this node, in a job of several"""
    deadline: Deadline | None = None
    rank_set: int = 0
    """number of this rank's set"""

    @property
    def is_first_of_node(self) -> bool:
        """True for the rank that shows a job's end on a node without rank 0."""
        return self.ranks_per_node > 0 and self.rank % self.ranks_per_node == 0

    @property
    def look_seconds(self) -> float:
        """Interval between a rank's lines: much shorter than rank 0 waits for one."""
        seconds = max(_LOOK_SECONDS, _LOOK_SECONDS * self.size / _RANKS_PER_LOOK)
        return min(seconds, self.limit_seconds / _LOOKS_PER_LIMIT) if self.limit_seconds else seconds

    @property
    def slack_seconds(self) -> float:
        return min(self.limit_seconds / _LOOKS_PER_LIMIT, _LONGEST_SLACK_SECONDS)

    def suspended_seconds(self, since_last_seconds: float) -> float:
        """Return the time for which this process was suspended, by the seconds since the agent's last run."""
        seconds = since_last_seconds - self.look_seconds
        return seconds if seconds > max(1.0, self.limit_seconds / 4) else 0.0


class Lines:
    """Lines of ranks in the job's store: all of them for rank 0, rank 0's for the others."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        self._store = store
        self._rank = rank
        self._read_ranks = list(range(size) if rank == 0 else [0])
        self._missing = set(self._read_ranks)
        self._texts: dict[int, bytes] = {}
        self._came = {} if rank == 0 else {0: time.monotonic()}
        self._read_at = time.monotonic()
        self._exchange: threading.Thread | None = None
        self.newest: dict[int, Line] = {}
        self.failure: FirstFailure | None = None
        self.has_store = True
        """False once the store has ended, with rank 0"""

    def exchange(self, own: Line, *, wait_seconds: float = 0.0) -> None:
        """Publish this rank's line and read others', unless the previous exchange is still running."""
        if self._exchange is not None:
            self._exchange.join(wait_seconds)
        if self.has_store and (self._exchange is None or not self._exchange.is_alive()):
            self._exchange = threading.Thread(target=self._run, args=(own,), name="exchange", daemon=True)
            self._exchange.start()
            self._exchange.join(wait_seconds)

    def _run(self, own: Line) -> None:
        try:
            self._store.set(f"{_LINE}{self._rank}", own.to_json())
            self._read()
        except RuntimeError:
            # Its clients fail by themselves.
            self.has_store = False

    def _read(self) -> None:
        self._missing -= {rank for rank in self._missing if self._store.check([f"{_LINE}{rank}"])}
        known = [rank for rank in self._read_ranks if rank not in self._missing]
        texts = self._store.multi_get([f"{_LINE}{rank}" for rank in known]) if known else []
        if self._rank == 0 and self.failure is None and self._store.check([FIRST]):
            self.failure = FirstFailure(*json.loads(self._store.get(FIRST)))
        self._read_at = time.monotonic()
        for rank, text in zip(known, texts, strict=True):
            if text != self._texts.get(rank):
                self._texts[rank], self._came[rank] = text, self._read_at
                self.newest[rank] = Line.from_json(text.decode())

    def forgive(self, seconds: float) -> None:
        """Exclude a time of suspension from all ranks' silence."""
        for rank in list(self._came):
            self._came[rank] += seconds

    def silent(self) -> dict[int, float]:
        """Return the seconds without a new line by rank."""
        # Rank 0 has the store; to the others it is silent too if the store is unresponsive.
        now = self._read_at if self._rank == 0 else time.monotonic()
        came, newest = self._came.copy(), self.newest.copy()
        gone = {rank for rank, line in newest.items() if line.has_left or (line.state is None and self._rank == 0)}
        return {rank: now - came[rank] for rank in came.keys() - gone - {self._rank}}


class Watch:
    """Watch over this rank and, on rank 0, the others; spreads requests to stop."""

    def __init__(
        self, config: WatchConfig, store: dist.Store | None, on_hang: OnHang | None = None,
        peers: Mapping[int, int] | None = None,
    ):  # fmt: skip
        """Without a store, as in a job of one rank, the rank decides alone. `peers`: processes of this node by rank."""
        self._peers = peers or {}
        self._config = config
        self._store = store
        self._on_hang = on_hang
        self._lines = Lines(store, config.rank, config.size) if store is not None else None
        self._progress = -1
        self._progressed_at = self._looked_at = time.monotonic()
        self._armed_at = -math.inf
        self._failed_at = math.inf
        """time at which a rank's failure was first known here"""
        self._num_lines = 0
        self._stacks: TextIO | None = None
        self._has_ended = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch within the block. A deadline that has passed already is known before its first step."""
        self._look_at_clock()
        try:
            with agent.doing(Duty(self._look, self._config.look_seconds)):
                yield
        finally:
            self._has_ended = True
            faulthandler.cancel_dump_traceback_later()
            if self._lines is not None:
                # A rank that is set up leaves at once, and the others may be anywhere.
                last = self._line(None, None, has_left=self._config.limit_seconds > 0)
                self._lines.exchange(last, wait_seconds=_LEAVING_SECONDS)
            self._close_stacks()

    def _look(self) -> None:
        self._note_progress()
        self._look_at_clock()
        config, idle_seconds = self._config, time.monotonic() - self._progressed_at
        state = state_of_this(config.rank, idle_seconds, config.host, config.rank_set)
        self._arm(state)
        board = self._board(state)
        verdict = decide(board)
        if isinstance(verdict, Hang):
            self._end_hung(board, verdict)
        if isinstance(verdict, Stop) and request.reason is None:
            request.note_from_afar(verdict.reason)
        if isinstance(verdict, FirstFailure):
            self._failed_at = min(self._failed_at, time.monotonic())
        late = time.monotonic() - self._failed_at
        if state.collective and min(late, state.idle_seconds) > _SURVIVOR_SECONDS:
            self._end_process(1)
        if state.collective and state.idle_seconds > _PEER_SECONDS and not isinstance(verdict, FirstFailure):
            self._look_for_death(board)
        if self._lines is not None:
            is_watched = self._config.limit_seconds > 0
            self._lines.exchange(self._line(state if is_watched else None, verdict, has_left=False))

    def _look_at_clock(self) -> None:
        deadline = self._config.deadline
        if deadline is not None and time.time() >= deadline.time:
            request.note(deadline.reason)

    def _note_progress(self) -> None:
        """Record this rank's progress; a time of suspension doesn't count."""
        now = time.monotonic()
        suspended = self._config.suspended_seconds(now - self._looked_at)
        self._progressed_at += suspended
        if self._lines is not None and suspended:
            self._lines.forgive(suspended)
        self._looked_at = now
        if activity.progress != self._progress or is_debugged():
            self._progress, self._progressed_at = activity.progress, now

    def _line(self, state: RankState | None, verdict: Verdict | None, *, has_left: bool) -> Line:
        self._num_lines += 1
        return Line(self._num_lines, state, request.reason or "", verdict if self._config.rank == 0 else None, has_left)

    def _board(self, state: RankState) -> Board:
        config, lines = self._config, self._lines
        if lines is None:
            return Board(state, config.limit_seconds)
        newest = lines.newest.copy()
        is_alone = not lines.has_store or (config.rank != 0 and newest.get(0, Line()).has_left)
        return Board(state, config.limit_seconds, config.slack_seconds, newest, lines.silent(), lines.failure, is_alone)

    # C's timer

    def _arm(self, state: RankState) -> None:
        """Arm C's timer to end this process if the agent doesn't return in time."""
        config, now = self._config, time.monotonic()
        is_due = config.limit_seconds > 0 and now - self._armed_at >= config.slack_seconds
        if not is_due or (stacks := self._open_stacks()) is None:
            return
        self._armed_at = now
        seconds = config.limit_seconds * state.patience + 3 * config.slack_seconds + 1.0
        if not self._has_ended:
            faulthandler.dump_traceback_later(seconds, file=stacks, exit=True)

    def _open_stacks(self) -> TextIO | None:
        """Open the file for C's timer; with the first stage the run's folder is this run's."""
        if self._stacks is None and activity.num_boundaries > 0:
            path = stacks_file(self._config.folder, self._config.rank)
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._stacks = open(path, "a", encoding="utf-8")  # noqa: SIM115
        return self._stacks

    def _close_stacks(self) -> None:
        if self._stacks is None:
            return
        self._stacks.close()
        path = Path(self._stacks.name)
        with suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()

    # The end

    def _end_hung(self, board: Board, hang: Hang) -> None:
        """End this rank because of a hang that it found, or that rank 0 published."""
        config, own, limit = self._config, board.own, board.limit_seconds
        if hang.line:
            # Launchers of different nodes have screens of their own.
            self._end(hang.line, shows=config.is_first_of_node)
        elif board.is_alone:
            line = hang_line(hang.ranks, [own], {}, limit)
            self._end(f"rank 0 has ended, and {line}" if own.rank else line, shows=True, has_store=False)
        elif own.rank:
            main = board.lines.get(0, Line()).state
            line = silent_main_line(own, main, board.silent[0], limit)
            # On rank 0's node the last rank, which is of the other set if there are two.
            last = (config.ranks_per_node or config.size) - 1
            self._end(line, shows=own.rank == last or config.is_first_of_node, has_store=False)
        else:
            line = hang_line(hang.ranks, board.states, board.silent, limit, config.ranks_per_node)
            _in_time(_OTHERS_SECONDS, lambda: self._publish(Hang(hang.ranks, line)))
            self._end(line, shows=True)

    def _look_for_death(self, board: Board) -> None:
        """End this rank, which waits for others, if the process of one is gone."""
        rank, lines = self._config.rank, board.lines
        dead = gone({peer: pid for peer, pid in self._peers.items() if not lines.get(peer, Line()).has_left})
        if dead is not None:
            _in_time(_OTHERS_SECONDS, lambda: self._publish(dead))
            is_first_left = rank == min({rank, *self._peers} - {dead.rank})
            self._end(f"rank {dead.rank}: {dead.cause}", shows=is_first_left, code=1)

    def _publish(self, verdict: Hang | FirstFailure) -> None:
        if self._store is None or self._lines is None:
            return
        first = verdict if isinstance(verdict, FirstFailure) else FirstFailure(verdict.ranks[0], verdict.line)
        with suppress(RuntimeError):
            publish(self._store, first)
            self._lines.exchange(self._line(None, verdict, has_left=False), wait_seconds=_LEAVING_SECONDS)

    def _end(self, line: str, *, shows: bool, has_store: bool = True, code: int = HUNG) -> None:
        """Write this rank's stacks and end the process, whatever its main thread does."""
        faulthandler.cancel_dump_traceback_later()
        # A network file system may never respond if a link is down.
        _in_time(_REPORT_SECONDS, lambda: self._report(line, shows, code))
        if self._store is not None:
            _in_time(3 * _OTHERS_SECONDS, lambda: self._end_together(has_store))
        self._end_process(code)

    def _end_process(self, code: int) -> None:
        for pid in self._peers.values():
            # A stopped process ignores its launcher's SIGTERM, which then waits for half a minute.
            if process_state(pid) == "T":
                os.kill(pid, signal.SIGKILL)
        os._exit(code)

    def _report(self, line: str, shows: bool, code: int) -> None:
        if self._waits_in_vain() and activity.on_wedged is not None:
            activity.on_wedged(line)
        written = write_stacks(self._config.folder, self._config.rank, line)
        if shows and self._on_hang is not None:
            self._on_hang(line, written, code)

    def _waits_in_vain(self) -> bool:
        """Return True if this rank waits for calls that have been without results for too long."""
        state = state_of_this(self._config.rank, time.monotonic() - self._progressed_at)
        return activity.calls is not None and bool(culprits([state], {}, self._config.limit_seconds))

    def _end_together(self, has_store: bool) -> None:
        """Record that this rank's stacks are written; on rank 0, wait for the others' stacks.

        The end of a rank closes connections, and others that haven't read the verdict yet would fail at these.
        """
        config, store = self._config, self._store
        if store is None or not has_store:
            time.sleep(config.slack_seconds + config.look_seconds + 0.5)
            return
        with suppress(RuntimeError):
            if config.rank != 0:
                store.add(_WRITTEN, 1)
                time.sleep(2 * config.look_seconds)
                return
            deadline = time.monotonic() + _OTHERS_SECONDS
            while store.add(_WRITTEN, 0) < config.size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)


def _in_time(seconds: float, work: Callable[[], None]) -> None:
    """Run work that may never end, for at most this long."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
