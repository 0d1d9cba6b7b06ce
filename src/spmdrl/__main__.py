"""Command line: `python -m spmdrl`, or each rank of `torchrun -m spmdrl`."""

from __future__ import annotations

import faulthandler
import signal
import sys

from spmdrl.cli.command_line import main
from spmdrl.runtime.screen import show_exception
from spmdrl.runtime.supervision.stop_request import ENDED_TOGETHER, SIGNALS

# Guarded, because processes started by `spawn` import this file again.
if __name__ == "__main__":
    sys.excepthook = show_exception
    # A crash in C leaves no other trace of where it was.
    faulthandler.enable()
    code = main()
    if code in ENDED_TOGETHER:
        # srun ends the ranks that are left once the first one has ended, and its own exit code would become theirs.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    raise SystemExit(code)
