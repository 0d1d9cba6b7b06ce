"""Commands as a person types them: on a terminal of their own, with the time of every line that appears there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.jobs import ROOT, environment
from tests.support.ranks import fork

COLUMNS, LINES = 120, 40
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Screen:
    """What one command left on the terminal."""

    command: str
    code: int
    text: str
    """without the escape sequences of a progress bar"""
    longest_silence: float
    """seconds in which nothing new appeared, from the command's start to its end"""

    @property
    def lines(self) -> list[str]:
        """What a person reads in the end: of what was written over, the last; no empty lines and no progress bars."""
        last = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in self.text.split("\n")]
        return [line for line in last if line and "━" not in line]


def typed(
    *command: str | Path,
    code: int | None = 0,
    answer: str = "",
    interrupt_at: str = "",
    cwd: Path = ROOT,
    timeout: float = 240,
    forked: bool = False,
) -> Screen:
    """Run `python -m ...` on a terminal. Raises AssertionError where it ends with another code, or with a traceback.

    `answer` is typed at the start, ended by end-of-file; Ctrl-C is typed once `interrupt_at` has appeared. With
    `forked`, the process has imported all that takes long before it starts, for verbs whose own start is looked at
    elsewhere.
    """
    words = [sys.executable, "-m", *map(str, command)]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    own = environment(TERM="xterm")
    process: subprocess.Popen[bytes] | _Forked
    if forked:
        process = _Forked(fork(_be_command, os.ttyname(theirs), own, cwd, words[3:]))
    else:
        process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, start_new_session=True, env=own,
            preexec_fn=_take_terminal,
        )  # fmt: skip
    try:
        if answer:
            os.write(ours, answer.encode() + b"\x04")
        text, silence = _watched(ours, process, interrupt_at, time.monotonic() + timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Not before, as a forked process opens it by its name.
        os.close(theirs)
        os.close(ours)
    screen = Screen(" ".join(words[1:]), process.returncode, _ESCAPES.sub("", text), silence)
    assert code is None or screen.code == code, f"{screen.command} ended with {screen.code}:\n{screen.text[-4000:]}"
    assert "Traceback" not in screen.text, f"{screen.command}:\n{screen.text[-4000:]}"
    return screen


def _take_terminal() -> None:
    # What starts tests in the background ignores it, and that would be inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class _Forked:
    """A forked process with what is used of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess):
        self._process = process
        self.pid = process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)


def _be_command(terminal: str, own: Mapping[str, str], cwd: Path, words: list[str]) -> None:
    """Do in this process, on a terminal, what `python -m spmdrl` does in its own."""
    os.setsid()
    # The first terminal that the head of a session opens becomes that session's.
    file = os.open(terminal, os.O_RDWR)
    for number in range(3):
        os.dup2(file, number)
    os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(own)
    os.chdir(cwd)
    from spmdrl.cli.command_line import main

    raise SystemExit(main(words))


def _watched(
    terminal: int, process: subprocess.Popen[bytes] | _Forked, interrupt_at: str, deadline: float
) -> tuple[str, float]:
    content, longest, latest = b"", 0.0, time.monotonic()
    waits_for = interrupt_at.encode()
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 0.2)
        now = time.monotonic()
        longest = max(longest, now - latest)
        if ready:
            content, latest = content + os.read(terminal, 65536), now
        elif process.poll() is not None:
            break
        if waits_for and waits_for in content:
            waits_for = b""
            os.write(terminal, b"\x03")
    else:
        raise AssertionError(f"not ended in time; on the screen:\n{content[-4000:].decode(errors='replace')}")
    process.wait(max(1.0, deadline - time.monotonic()))
    return content.decode(errors="replace"), longest
