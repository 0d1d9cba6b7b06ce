"""A worker process as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdrl.runtime.workers.descent import ProcessTree, send
from spmdrl.runtime.workers.guard import ENDINGS
from spmdrl.runtime.workers.strikes import Subject

_READ_BYTES = 1 << 16
_MAX_START_SECONDS = 120.0
_MAX_OWN_END_SECONDS = 0.3
_MAX_END_SECONDS = 2.0
_MAX_LINE_BYTES = 1 << 30
# The variables that every worker gets: where programs and libraries are found, how text is read, which devices there
# are. Nothing that opens an account, so that a job's secrets aren't handed on.
_VARIABLES = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP PWD TERM LD_LIBRARY_PATH DYLD_LIBRARY_PATH "
    "VIRTUAL_ENV CONDA_PREFIX XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE "
    "TRANSFORMERS_OFFLINE TORCH_HOME NLTK_DATA CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME CUDA_PATH "
    "NVIDIA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES SSL_CERT_FILE SSL_CERT_DIR "
    "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE JAVA_HOME COVERAGE_PROCESS_START"
    .split()
)  # fmt: skip
_VARIABLE_PREFIXES = ("LC_", "PYTHON", "ASCEND_", "OMP_", "OPENBLAS_", "MKL_", "TORCH_DEVICE_BACKEND_")
# Workers are mostly scalar code; the threads of numeric libraries would only take cores and memory from the rank.
_FIXED_VARIABLES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerLost(Exception):
    """The worker's pipe ended, or holds something that isn't a message."""


@dataclass(frozen=True)
class PendingCall:
    """A call that waits for a worker or is with one."""

    key: Hashable
    nonce: str
    """what the call's answer must come with: other processes that get at the pipe can't guess it"""
    line: bytes
    """the message that is sent"""
    num_rows: int
    seconds: float
    """what it may take"""
    subject: Subject | None = None
    """what it is about"""


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker of a pool starts with, and what its settings are called in messages."""

    section: str
    """the section of the configuration that has `timeout_seconds` and `memory_limit_gib`: reward, environment"""
    functions_key: str
    """the setting that names the functions"""
    variables_key: str
    """the setting that names environment variables"""
    runner: str
    """the module whose `load` makes an answering function of the names"""
    functions: Sequence[str]
    environment: Sequence[str]
    """variables that it gets beside those on the list"""
    memory_limit_gib: float | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """what `load` gets besides the names"""

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit_gib is None else int(self.memory_limit_gib * 2**30)

    @property
    def endings(self) -> dict[int, str]:
        """What is reported of a worker that its guard ended, by the guard's exit code."""
        return {code: text.format(memory_limit=f"{self.section}.memory_limit_gib") for code, text in ENDINGS.items()}


class WorkerProcess:
    """A worker, and the guard that ends it with all that it started: starting -> idle -> busy -> idle ... -> killed.

    Busy, it answers the calls that it was given one after the other, each with a deadline of its own.
    """

    def __init__(self, setup: WorkerSetup):
        self._endings = setup.endings
        memory_limit = setup.memory_limit_bytes or 0
        python_path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spmdrl.runtime.workers.guard", str(os.getpid()), str(memory_limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environment(os.environ, setup.environment, python_path, key=setup.variables_key),
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.write_fd = self._process.stdin.fileno()
        self.read_fd = self._process.stdout.fileno()
        os.set_blocking(self.write_fd, False)
        os.set_blocking(self.read_fd, False)
        self._received = bytearray()
        first = {
            "section": setup.section,
            "functions_key": setup.functions_key,
            "runner": setup.runner,
            "functions": list(setup.functions),
            "settings": dict(setup.settings),
            "memory_limit_bytes": setup.memory_limit_bytes,
        }
        self._unsent = memoryview(line_of(first))
        self._has_ended = False
        self.is_ready = False
        self.calls: deque[PendingCall] = deque()
        """those that it was given and hasn't answered; it works on the first"""
        self.deadline = time.monotonic() + _MAX_START_SECONDS

    @property
    def pid(self) -> int:
        """The guard's process id; the worker and its processes descend from it."""
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.calls

    @property
    def has_unsent(self) -> bool:
        return len(self._unsent) > 0

    @property
    def is_overdue(self) -> bool:
        return not self.is_idle and time.monotonic() > self.deadline

    def start(self, calls: Sequence[PendingCall]) -> None:
        """Give it calls, of which each may take its own time."""
        assert self.is_idle, (self.pid, self.calls)
        self.calls.extend(calls)
        self.deadline = time.monotonic() + calls[0].seconds
        self._unsent = memoryview(b"".join(call.line for call in calls))

    def answered(self) -> None:
        """Its first call is answered: it goes on with the next one, if there is one."""
        self.calls.popleft()
        if self.calls:
            self.deadline = time.monotonic() + self.calls[0].seconds

    def send(self) -> None:
        """Write as much as the pipe takes now."""
        try:
            self._unsent = self._unsent[os.write(self.write_fd, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # How the process ended is found at the read end.
            self._unsent = memoryview(b"")

    def receive(self) -> list[Any]:
        """The messages that have come; raises WorkerLost where no more will."""
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            self._has_ended = True
            raise WorkerLost("its pipe ended")
        ended, newline, begun = data.rpartition(b"\n")
        if not newline:
            self._received += begun
            if len(self._received) > _MAX_LINE_BYTES:
                raise WorkerLost(f"it sent more than {_MAX_LINE_BYTES} bytes")
            return []
        lines, self._received = (self._received + ended).split(b"\n"), bytearray(begun)
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise WorkerLost(f"something else wrote into its pipe ({error})") from error

    def kill(self) -> str:
        """End the worker with all that it started; returns how it ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._has_ended:
            # Its pipe closes a moment before the guard sees how it ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_MAX_OWN_END_SECONDS)
        # Without calls to come the guard ends everything, and itself with the worker's own ending.
        self._process.stdin.close()
        try:
            code = self._process.wait(_MAX_END_SECONDS)
        except subprocess.TimeoutExpired:
            # The functions stopped it, or their processes are too many for it alone.
            ProcessTree(self.pid).end()
            send(self.pid, signal.SIGKILL)
            code = self._process.wait()
        self._process.stdout.close()
        if code in self._endings:
            return self._endings[code]
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def line_of(message: Any) -> bytes:
    """A message on a pipe: a line of JSON. Values that JSON doesn't have (dates, decimals) become their text."""
    line = json.dumps(message, default=str).encode() + b"\n"
    if len(line) > _MAX_LINE_BYTES:
        raise ValueError(f"a call takes {len(line)} bytes, but at most {_MAX_LINE_BYTES}; send fewer rows per call")
    return line


def clean_environment(
    environment: Mapping[str, str], also: Sequence[str], python_path: str, *, key: str
) -> dict[str, str]:
    """Those variables that are on the list or named in `also`, the setting `key`.

    Raises ValueError if one of `also` isn't set.
    """
    missing = [name for name in also if name not in environment]
    if missing:
        raise ValueError(
            f"{key} names {', '.join(missing)}, but the job's environment has no such variable; "
            "set it where the job is started, or take it out"
        )
    common = [name for name in environment if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)]
    passed = {name: environment[name] for name in common}
    return {**passed, **_FIXED_VARIABLES, **{name: environment[name] for name in also}, "PYTHONPATH": python_path}
