"""Display of failures: one line with cause and place; whole tracebacks go into files of the run's folder."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import spmdrl
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.ending import FirstFailure, PeerFailed, cause_of, is_consequence, reason_of_stop
from spmdrl.runtime.supervision.fence import FOLDER_TAKEN, loss_of_folder
from spmdrl.runtime.supervision.hang_report import stacks_file
from spmdrl.runtime.supervision.launcher import write_error_file
from spmdrl.runtime.supervision.stop_request import INTERRUPTED, code_of_stop, request

_LONGEST_CAUSE = 500
# Time for one rank to print the cause and for the launcher to end the others: one cause on the screen.
OTHER_RANKS_WAIT_SECONDS = 5.0
_LAUNCHER_SECONDS = 20.0


def wants_traceback(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if tracebacks belong on the screen: with SPMDRL_TRACEBACK=1, and under a debugger."""
    words = sys.orig_argv[1:4]
    return environ.get("SPMDRL_TRACEBACK", "") not in ("", "0") or sys.gettrace() is not None or "pdb" in words


def end_with(
    failure: Exception, folder: Path, launch: LaunchEnvironment, let_signals_end: Callable[[], object] = lambda: None
) -> int:
    """Show why this rank ends, unless another rank does, and return the exit code.

    After `let_signals_end`, the launcher's signals end this rank at once.
    """
    if isinstance(failure, PeerFailed) and failure.first.is_interruption:
        return INTERRUPTED
    if lost := loss_of_folder(failure.first.cause if isinstance(failure, PeerFailed) else cause_of(failure)):
        if launch.local_rank == 0:
            show(f"spmdrl: {lost}", stream=sys.stderr)
        write_error_file(f"spmdrl: {lost}", FOLDER_TAKEN)
        return FOLDER_TAKEN
    if isinstance(failure, PeerFailed) and (reason := reason_of_stop(failure.first.cause)) is not None:
        return code_of_stop(reason)
    is_named = False
    if isinstance(failure, PeerFailed):
        # A dead rank can't show its end, and a rank of another node has another screen.
        is_named = failure.first.is_death or launch.node_of(failure.first.rank) != launch.node_rank
        if is_named:
            _show_first(failure.first, launch)
    let_signals_end()
    if isinstance(failure, PeerFailed) or is_consequence(failure):
        # The launcher that ends this rank has already printed why.
        request.end_by_signal()
    written = write_traceback(failure, folder, launch.rank)
    if isinstance(failure, PeerFailed):
        # The launcher ends this rank meanwhile, unless each rank has its own launcher and screen; the ranks of its node
        # notice a dead one themselves.
        has_launcher = "TORCHELASTIC_RUN_ID" in os.environ or launch.source == "msrun"
        time.sleep(_LAUNCHER_SECONDS if has_launcher and not is_named else OTHER_RANKS_WAIT_SECONDS)
        if not is_named:
            _show_first(failure.first, launch)
    else:
        show_cause(failure, f"spmdrl: rank {launch.rank}" if launch.world_size > 1 else "spmdrl", written)
    return 1


def _show_first(first: FirstFailure, launch: LaunchEnvironment) -> None:
    """Show another rank's failure, once per node."""
    line = f"spmdrl: rank {first.rank}: {first.cause}"
    write_error_file(line, 1)
    if launch.local_rank == (1 if first.rank == launch.rank - launch.local_rank else 0):
        show(line, stream=sys.stderr)


def show_cause(failure: BaseException, name: str, written: Path | None) -> None:
    """Print one line on stderr, and write it into torchrun's error file, if any, so that torchrun ends with it too."""
    cause = cause_of(failure)
    cause = cause if len(cause) <= _LONGEST_CAUSE else f"{cause[:_LONGEST_CAUSE]}..."
    place = place_of(failure)
    line = f"{name}: {cause}" + (f" (at {place})" if place else "")
    show(f"{line}; the traceback is in {written}" if written is not None else line, stream=sys.stderr)
    if written is None:
        show("".join(traceback.format_exception(failure)), stream=sys.stderr, end="")
    write_error_file(line, 1)


def write_traceback(failure: BaseException, folder: Path, rank: int) -> Path | None:
    """Append the whole traceback to the rank's file below the run's folder; returns None if that can't be written."""
    path = stacks_file(folder, rank)
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {socket.gethostname()}, process {os.getpid()}: {' '.join(sys.argv)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"--- {head}\n{''.join(traceback.format_exception(failure))}\n")
    except OSError:
        return None
    return path


def place_of(failure: BaseException) -> str:
    """Return the innermost line of this package that the failure passed, else the innermost line of all."""
    frames = traceback.extract_tb(failure.__traceback__)
    assert spmdrl.__file__ is not None
    package = Path(spmdrl.__file__).parent
    own = [frame for frame in frames if package in Path(frame.filename).parents]
    for frame in reversed(own or frames):
        path = Path(frame.filename)
        shown = path.relative_to(package.parent) if package in path.parents else path
        return f"{shown}:{frame.lineno}"
    return ""
