"""Alerts of a run: watched for on its main rank, written to alerts.jsonl, and passed to a command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from spmdrl.nouns.settings.log_config import LogConfig
from spmdrl.observability.alerts import Alert, AlertWatch
from spmdrl.observability.jsonl import JsonlWriter, truncate_jsonl
from spmdrl.observability.log import read_metrics
from spmdrl.observability.outage import best_effort, warn

ALERTS_FILE = "alerts.jsonl"
COMMAND_SECONDS = 30.0
_LAST_SECONDS = 5.0
"""time that commands get at the end of a run"""
_MOST_COMMANDS = 4
_MOST_CHARACTERS = 2000


class AlertLog:
    """Alerts after each step, as lines for the screen; `close` ends the commands that still run."""

    def __init__(self, run_dir: Path, config: LogConfig, *, last_step: int):
        """Watch a run that goes on after `last_step`; alerts of later steps are dropped from its file."""
        self._run_dir, self._path = run_dir, run_dir / ALERTS_FILE
        earlier = [metrics for step, metrics in read_metrics(run_dir) if 0 < step <= last_step]
        self._watch = AlertWatch(config.alerts, earlier)
        self._commands = AlertCommands(config.alert_command)
        self._writer: JsonlWriter | None = None
        if self._path.is_file():
            truncate_jsonl(self._path, last_step)

    def after_step(self, step: int, metrics: Mapping[str, float], slow: Sequence[str]) -> list[str]:
        """Return the lines of a step's alerts, which are in the file and on their way by then."""
        self._commands.end_late()
        alerts = self._watch.alerts(step, metrics, slow)
        for alert in alerts:
            self._write(alert)
            self._commands.start(f"{self._run_dir.name}: {alert.line}")
        return [alert.line for alert in alerts]

    def close(self) -> None:
        self._commands.close()
        if self._writer is not None:
            self._writer.close()

    def _write(self, alert: Alert) -> None:
        with best_effort(ALERTS_FILE):
            if self._writer is None:
                self._writer = JsonlWriter(self._path)
            self._writer.write(asdict(alert))


class AlertCommands:
    """The command of `log.alert_command`, started without a shell and never waited for between steps."""

    def __init__(self, command: Sequence[str]):
        self._command = command
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []

    def start(self, message: str) -> None:
        """Start the command with a message; with too many under way, or if it can't start, only a warning is shown."""
        if not self._command:
            return
        if len(self._running) >= _MOST_COMMANDS:
            warn(f"log.alert_command isn't run for an alert: {_MOST_COMMANDS} of it are under way")
            return
        words = [*self._command, message[:_MOST_CHARACTERS].replace("\0", " ")]
        try:
            # A group of its own, so that all that it starts can be ended, and Ctrl-C doesn't reach it.
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as failure:
            warn(f"log.alert_command {self._command[0]} can't start: {failure}")
            return
        self._running.append((process, time.monotonic() + COMMAND_SECONDS))

    def end_late(self) -> None:
        """End commands that are over their time, and forget those that ended."""
        running = self._running
        self._running = []
        for process, deadline in running:
            if process.poll() is not None:
                if process.returncode:
                    warn(f"log.alert_command {self._command[0]} ended with {process.returncode}")
            elif time.monotonic() < deadline:
                self._running.append((process, deadline))
            else:
                warn(f"log.alert_command {self._command[0]} is ended, as it took over {COMMAND_SECONDS:.0f} s")
                _end(process)

    def close(self) -> None:
        """Wait a little for commands, then end them."""
        deadline = time.monotonic() + _LAST_SECONDS
        for process, _ in self._running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process)
        self._running = []


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
