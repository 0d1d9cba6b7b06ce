"""Runs the command line: `python -m spmdrl`, or each rank of `torchrun -m spmdrl`."""

from __future__ import annotations

import sys

from spmdrl.cli.command_line import main
from spmdrl.observability.terminal.screen import show_exception

# Guarded, because processes started by `spawn` import this file again.
if __name__ == "__main__":
    sys.excepthook = show_exception
    raise SystemExit(main())
