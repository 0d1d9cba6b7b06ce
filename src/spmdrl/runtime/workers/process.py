"""Worker processes, from their parent's side."""

from __future__ import annotations

import contextlib
import json
import math
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
from spmdrl.runtime.workers.guard import ENDINGS, ending_of
from spmdrl.runtime.workers.strikes import Subject
from spmdrl.runtime.workers.worker import MAX_LINE_BYTES

_READ_BYTES = 1 << 16
_MAX_START_SECONDS = 120.0
_MAX_OWN_END_SECONDS = 0.3
_MAX_END_SECONDS = 2.0
# A concurrent worker ends late calls itself, and is lost only if it doesn't.
_GRACE_SECONDS = 30.0
# Variables that every worker gets: paths of programs and libraries, locale, devices. No credentials, so that a job's
# secrets aren't passed on.
_VARIABLES = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP PWD TERM LD_LIBRARY_PATH DYLD_LIBRARY_PATH "
    "VIRTUAL_ENV CONDA_PREFIX XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE "
    "TRANSFORMERS_OFFLINE TORCH_HOME NLTK_DATA CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME CUDA_PATH "
    "NVIDIA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES SSL_CERT_FILE SSL_CERT_DIR "
    "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE JAVA_HOME COVERAGE_PROCESS_START"
    .split()
)  # fmt: skip
_VARIABLE_PREFIXES = ("LC_", "PYTHON", "ASCEND_", "OMP_", "OPENBLAS_", "MKL_", "TORCH_DEVICE_BACKEND_")
# Workers run mostly scalar code; numeric libraries' threads would only take cores and memory from the rank.
_FIXED_VARIABLES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerLost(Exception):
    """The worker's pipe ended, or contains something other than messages."""


@dataclass(frozen=True)
class PendingCall:
    """A call in the queue or at a worker."""

    key: Hashable
    nonce: str
    """secret that the answer must repeat: other processes with access to the pipe can't guess it"""
    line: bytes
    """message to the worker"""
    num_rows: int
    seconds: float
    """time limit of the call"""
    subject: Subject | None = None
    """subject of the call, for strikes; None: none"""
    affinity: Hashable = None
    """calls with the same one share a worker"""
    opening: PendingCall | None = None
    """call that precedes it at a worker that is new to its affinity"""
    limit: str = ""
    """setting of the time limit, for messages"""
    is_last: bool = False
    """true if it ends its affinity"""


@dataclass(frozen=True)
class BegunCall:
    """A call that a worker works on, and its deadline on the monotonic clock."""

    call: PendingCall
    deadline: float


@dataclass(frozen=True)
class WorkerSetup:
    """Inputs of every worker of a pool, and the names of its settings in messages."""

    section: str
    """config section with `timeout_seconds` and `memory_limit_gib`: reward, environment"""
    functions_key: str
    """setting that names the functions"""
    variables_key: str
    """setting that names environment variables"""
    runner: str
    """module whose `load` makes `Loaded` of the names"""
    functions: Sequence[str]
    environment: Sequence[str]
    """environment variables that it gets beside the listed ones"""
    memory_limit_gib: float | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """arguments of `load` beside the names"""

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit_gib is None else int(self.memory_limit_gib * 2**30)

    @property
    def endings(self) -> dict[int, str]:
        """Messages about a worker that its guard killed, by the guard's exit code."""
        return {code: text.format(memory_limit=f"{self.section}.memory_limit_gib") for code, text in ENDINGS.items()}


class WorkerProcess:
    """A worker with its guard, which kills it with all that it started: starting -> idle -> busy -> idle ... -> killed.

    While busy, it answers its calls one after another, each with its own deadline; a concurrent one all at once.
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
            "python_path": os.environ.get("PYTHONPATH"),
        }
        self._unsent = memoryview(line_of(first))
        self._has_ended = False
        self.is_ready = False
        self.is_concurrent = False
        self.begun: dict[str, BegunCall] = {}
        """calls that it works on, by nonce"""
        self._next: deque[PendingCall] = deque()
        """calls that it has, behind those begun"""
        self.pinned: deque[PendingCall] = deque()
        """calls that wait for this worker"""
        self._start_deadline = time.monotonic() + _MAX_START_SECONDS

    @property
    def pid(self) -> int:
        """Process id of the guard, from which the worker and its processes descend."""
        return self._process.pid

    @property
    def takes_calls(self) -> bool:
        return self.is_ready and (self.is_concurrent or not self.begun)

    @property
    def unanswered(self) -> list[PendingCall]:
        """Calls that it has and that wait for it, in their order."""
        return [*(one.call for one in self.begun.values()), *self._next, *self.pinned]

    @property
    def deadline(self) -> float:
        """Time at which it is lost; never while it is idle."""
        if not self.is_ready:
            return self._start_deadline
        return min((one.deadline for one in self.begun.values()), default=math.inf)

    @property
    def has_unsent(self) -> bool:
        return len(self._unsent) > 0

    def start(self, calls: Sequence[PendingCall]) -> None:
        """Give it calls, each with its own time limit."""
        assert self.takes_calls, (self.pid, self.begun)
        self._next.extend(calls)
        self._begin()
        self._unsent = memoryview(b"".join((self._unsent, *(call.line for call in calls))))

    def answered(self, call: PendingCall) -> None:
        """Drop a call that it worked on, and start the next one's deadline, if any."""
        del self.begun[call.nonce]
        self._begin()

    def _begin(self) -> None:
        while self._next and self.takes_calls:
            call = self._next.popleft()
            seconds = call.seconds
            if self.is_concurrent:
                # It has the opening call at the same time, and answers that one first.
                seconds += _GRACE_SECONDS + (call.opening.seconds if call.opening else 0.0)
            self.begun[call.nonce] = BegunCall(call, time.monotonic() + seconds)

    def send(self) -> None:
        """Write as much as the pipe takes now."""
        try:
            self._unsent = self._unsent[os.write(self.write_fd, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The read end finds how the process ended.
            self._unsent = memoryview(b"")

    def receive(self) -> list[Any]:
        """Return the messages that have arrived; raises WorkerLost if no more can."""
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
            if len(self._received) > MAX_LINE_BYTES:
                raise WorkerLost(f"it sent more than {MAX_LINE_BYTES} bytes")
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
            # The pipe closes a moment before the guard collects the worker.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_MAX_OWN_END_SECONDS)
        # Once the pipe of calls is closed the guard kills everything and exits with the worker's status.
        self._process.stdin.close()
        try:
            code = self._process.wait(_MAX_END_SECONDS)
        except subprocess.TimeoutExpired:
            # The functions stopped the guard, or it can't kill all processes alone.
            ProcessTree(self.pid).end()
            send(self.pid, signal.SIGKILL)
            code = self._process.wait()
        self._process.stdout.close()
        return self._endings.get(code) or ending_of(code)


def line_of(message: Any) -> bytes:
    """Encode a message as a line of JSON; values that JSON lacks (dates, decimals) become text."""
    line = json.dumps(message, default=str).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a call takes {len(line)} bytes, but at most {MAX_LINE_BYTES}; send fewer rows per call")
    return line


def clean_environment(
    environment: Mapping[str, str], also: Sequence[str], python_path: str, *, key: str
) -> dict[str, str]:
    """Return the variables on the list or named in `also`, the setting `key`.

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
