"""The plan of a run that begins, made by a child process of its main rank while the model is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.observability.jsonl import read_object
from spmdrl.observability.outage import best_effort
from spmdrl.observability.report.plan_section import plan_lines
from spmdrl.observability.report.run_files import PLAN_FILE
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World
from spmdrl.runtime.launch import without_launcher
from spmdrl.runtime.supervision.stop_request import stop_reason
from spmdrl.runtime.workers.descent import ProcessTree, send

WAIT_SECONDS = 5.0
"""time by which the first step may begin later, so that the plan is shown before it"""
_POLL_SECONDS = 0.2
_LOWEST_PRIORITY = 19
# It would only take their memory, and PyTorch has one place for planned devices and those of plug-ins.
_WITHOUT_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


class PlanBeside:
    """The planning process, and the thread that shows its plan; nothing without a device, and on other ranks."""

    def __init__(self, checked: CheckedRun, world: World, device: str | None):
        """Start to plan the run on devices of a kind."""
        self._is_wanted = device is not None
        self._file = checked.config.run.folder / PLAN_FILE
        self._made = self._file.with_name(f".{PLAN_FILE}.new")
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._problem = ""
        if device is not None and world.is_main:
            job = ["--ranks", str(world.size), "--nodes", str(world.launch.num_nodes), "--device", device]
            try:
                self._made.unlink(missing_ok=True)
                self._start([*job, "--json", str(self._made)], checked.resolved_config)
            except OSError as error:
                self._problem = str(error)

    def _start(self, arguments: list[str], config: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as given:
            given.write(config.encode())
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spmdrl", "plan", "/dev/stdin", *arguments],
                env=without_launcher(os.environ) | _WITHOUT_DEVICES,
                stdin=given, stdout=subprocess.DEVNULL, stderr=self._errors,
            )  # fmt: skip
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOWEST_PRIORITY)

    def show_on(self, console: Console) -> None:
        """Show the plan as soon as it is there, or a warning if there will be none."""
        if self._process is not None or self._problem:
            self._thread = threading.Thread(target=self._show, args=(console,), name="plan", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait some seconds until it is shown. Collective if a plan is wanted."""
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)
        if self._is_wanted:
            # Other ranks would count the wait as part of their first step.
            barrier()

    def close(self) -> None:
        """End the process if it still runs."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()
        self._end()

    def _show(self, console: Console) -> None:
        # A part of the file is no object.
        while self._process is not None and self._process.poll() is None and not read_object(self._made):
            if self._is_closing.wait(_POLL_SECONDS):
                return
        # If the run doesn't fit, it would go on to look for a change.
        self._end()
        if plan := read_object(self._made):
            # Until now the folder had the plan of the run's earlier part, if any.
            with best_effort(PLAN_FILE):
                self._made.replace(self._file)
            for line in plan_lines(plan):
                console.note(f"  plan       {line}")
        elif stop_reason() is None:  # a launcher's signal ends the process as well
            console.note(f"WARNING: the run goes on without a plan: {self._problem or self._last_words()}")

    def _last_words(self) -> str:
        assert self._process is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("spmdrl: ") if lines else f"its process ended with {self._process.returncode}"

    def _end(self) -> None:
        """Kill and collect the process, with those that it started."""
        if self._process is not None and self._process.poll() is None:
            # A stopped process starts no others.
            send(self._process.pid, signal.SIGSTOP)
            ProcessTree(self._process.pid).end()
            self._process.kill()
            self._process.wait()
