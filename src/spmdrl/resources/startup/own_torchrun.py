"""torchrun's own program, with an agent whose ranks have time to save, and one line where it has a page."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, ClassVar

import torch.distributed.launcher.api as launcher_api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from spmdrl.resources.startup.one_node import keep_to_one_node
from spmdrl.resources.startup.patient_rendezvous import PatientRendezvous, know_this_node
from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.ending import cause_of
from spmdrl.runtime.supervision.fence import FOLDER_TAKEN
from spmdrl.runtime.supervision.hang_report import HUNG
from spmdrl.runtime.supervision.launcher import announce
from spmdrl.runtime.supervision.stop_request import ENDED_TOGETHER, INTERRUPTED, SIGNALS, STOPPED, UNSAVED

# For which ranks may save after SIGTERM before they are killed; a scheduler that sent it has a limit besides.
_SAVING_SECONDS = 3600
# What torchrun reports of ranks that end is in their own line, or follows from it.
_QUIETED = ("torch.distributed.elastic.", "torch.distributed.launcher.", "torch.distributed.run")


def run_ranks(argv: Sequence[str]) -> int:
    """Run torchrun; returns the exit code of the rank that failed first, or 128 + the signal that ended it.

    That of the ranks where they were stopped on request.
    """
    arguments = parse_args(list(argv))
    keep_to_one_node(arguments)
    know_this_node(arguments)
    announce()
    if "LOGLEVEL" not in os.environ:
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(_QUIETED)]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if arguments.log_dir is None and arguments.redirects == arguments.tee == "0":
        # Else torchrun makes a folder beside other temporary files, and never removes it.
        arguments.log_dir = os.devnull
    launcher_api.LocalElasticAgent = StoppingAgent
    try:
        run(arguments)
    except ChildFailedError as error:
        return _show_failure(error)
    except SignalException as error:
        return StoppingAgent.agreed or 128 + error.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # Such as a rendezvous without other nodes, or the end of another node's launcher.
        show(f"torchrun: {cause_of(error)}", stream=sys.stderr)
        return 1
    return 0


class StoppingAgent(LocalElasticAgent):
    """torchrun's agent, whose ranks have time to save when it is asked to stop."""

    agreed: ClassVar = 0
    """the exit code of ranks that ended on request, or with more than they could save; 0: they didn't"""
    _has_passed_on = False

    def __init__(self, spec: WorkerSpec, *arguments: Any, **options: Any):
        # The launcher leaves the rendezvous by the same reference.
        spec.rdzv_handler = PatientRendezvous(spec.rdzv_handler)
        super().__init__(spec, *arguments, **options)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        hangup = signal.getsignal(signal.SIGHUP)
        started = super()._start_workers(worker_group)
        if hangup == signal.SIG_IGN:
            # As nohup wants it, whose ranks torchrun would end.
            signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGUSR1, self._pass_on)
        return started

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._has_passed_on = True
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        StoppingAgent.agreed = _agreed_code(codes, signal.SIGUSR1 if self._has_passed_on else None)
        if StoppingAgent.agreed:
            self._remaining_restarts = 0
        return result

    def _shutdown(self, death_sig: signal.Signals | None = None, *arguments: Any, **options: Any) -> None:
        """End the ranks; those that a signal to this process ends have the time that saving takes."""
        if death_sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) and self._pcontext is not None:
            try:
                self._pcontext.close(death_sig, _SAVING_SECONDS)
            except SignalException:
                show("spmdrl: asked to stop for the second time; the ranks are killed", stream=sys.stderr)
                self._pcontext.close(signal.SIGKILL, 1)
            StoppingAgent.agreed = _agreed_code(_exit_codes(self._pcontext), death_sig)
        super()._shutdown(death_sig or signal.SIGTERM, *arguments, **options)


def _exit_codes(context: PContext) -> set[int | None]:
    handlers = getattr(context, "subprocess_handlers", {})
    return {handler.proc.returncode for handler in handlers.values()}


def _agreed_code(codes: set[int | None], asked: int | None) -> int:
    """The exit code of ranks that agreed to end; 0 where one of them failed.

    A rank that had not begun ends by the signal itself: by the one that was passed on where none had.
    """
    agreed = codes.intersection(ENDED_TOGETHER)
    if asked is not None and codes == {-asked}:
        return INTERRUPTED if asked == signal.SIGINT else STOPPED
    if codes - {-number for number in SIGNALS} != agreed:
        return 0
    return next((code for code in (UNSAVED, INTERRUPTED, STOPPED) if code in agreed), 0)


def _show_failure(error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    if StoppingAgent.agreed:
        return StoppingAgent.agreed
    if any(one.exitcode == HUNG for one in error.failures.values()):
        # Beside it, the rank that hung may have been killed by another one.
        return HUNG
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = "; the kernel does that where memory runs out" if -failure.exitcode == signal.SIGKILL else ""
        show(f"spmdrl: rank {rank} (process {failure.pid}) was ended by {name}{hint}", stream=sys.stderr)
        return 128 - failure.exitcode
    if failure.exitcode not in (1, 2, FOLDER_TAKEN, *ENDED_TOGETHER):
        show(f"spmdrl: rank {rank} (process {failure.pid}) ended with {failure.exitcode}", stream=sys.stderr)
    return failure.exitcode
