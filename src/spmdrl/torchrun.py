"""torchrun whose last line is the cause: `python -m spmdrl.torchrun [torchrun's options] -m spmdrl train run.yaml`.

Options and ranks are torchrun's own; on one node it opens no port. Where ranks fail, its page of tracebacks is left
out: the rank that failed first has named the cause in one line already, and for a rank that was killed, one line names
it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from spmdrl.observability.terminal.screen import show
from spmdrl.resources.startup.ending import cause_of
from spmdrl.resources.startup.launcher import announce
from spmdrl.resources.startup.one_node import keep_to_one_node

# What torchrun reports of ranks that end is in their own line, or follows from it.
_QUIETED = ("torch.distributed.elastic.", "torch.distributed.launcher.", "torch.distributed.run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; returns the exit code of the rank that failed first, or 128 + the signal that ended it."""
    arguments = parse_args(list(sys.argv[1:] if argv is None else argv))
    keep_to_one_node(arguments)
    announce()
    if "LOGLEVEL" not in os.environ:
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(_QUIETED)]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if arguments.log_dir is None and arguments.redirects == arguments.tee == "0":
        # Else torchrun makes a folder beside other temporary files, and never removes it.
        arguments.log_dir = os.devnull
    try:
        run(arguments)
    except ChildFailedError as error:
        return _show_failure(error)
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # Such as a rendezvous without other nodes, or the end of another node's launcher.
        show(f"torchrun: {cause_of(error)}", stream=sys.stderr)
        return 1
    return 0


def _show_failure(error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = "; the kernel does that where memory runs out" if -failure.exitcode == signal.SIGKILL else ""
        show(f"spmdrl: rank {rank} (process {failure.pid}) was ended by {name}{hint}", stream=sys.stderr)
        return 128 - failure.exitcode
    return failure.exitcode


if __name__ == "__main__":
    raise SystemExit(main())
