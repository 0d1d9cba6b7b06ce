"""torchrun whose last line is the cause: `python -m spmdrl.torchrun [torchrun's options] -m spmdrl train run.yaml`.

Options and ranks are torchrun's own; on one node it opens no port. Where ranks fail, its page of tracebacks is left
out: the rank that failed first has named the cause in one line already, and for a rank that was killed, one line names
it. SIGTERM and SIGUSR1 are passed on to the ranks, which have time to save, and ranks that were stopped on request
aren't restarted: then the exit code is theirs, 75.
"""

from __future__ import annotations

import os
import sys

from spmdrl.runtime.supervision.stop_request import request


def main() -> int:
    """Run torchrun with this program's arguments; returns its exit code."""
    # Read when torch is imported: its warnings of lost connections are pages of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Until there are ranks to pass it on to, a signal ends this process, with the same code.
    with request.handling_signals(0):
        # Imported only here, since it takes seconds.
        from spmdrl.resources.startup.own_torchrun import run_ranks

        return run_ranks(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
