"""Runs the command line: `python -m spmdrl`, or each rank of `torchrun -m spmdrl`."""

from __future__ import annotations

from spmdrl.cli import main

# Guarded, because processes started by `spawn` import this file again.
if __name__ == "__main__":
    raise SystemExit(main())
