"""One stage in processes of its own: `python -m spmdrl.verbs.doctor.stage_process MODULE:FUNCTION ...`.

Each rank writes its outcome into a file. A stage that crashes leaves none, and ends only itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import traceback
from pathlib import Path

from spmdrl.resources.world import open_world
from spmdrl.runtime.supervision.ending import PeerFailed, cause_of
from spmdrl.verbs.doctor.commands import CommandFailed
from spmdrl.verbs.doctor.stage_run import RankOutcome, StageRun, StageSkipped

# A rank that waits longer for another one has lost it; the stage's own limit is 480 s.
_LONGEST_WAIT_SECONDS = 240.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("function", help="module:function")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--scale", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the ranks' outcomes")
    parser.add_argument("--starts-jobs", action="store_true")
    arguments = parser.parse_args()
    path = arguments.out / f"rank_{os.environ.get('RANK', '0')}.json"
    # Inside the folder that the check removes, in case this process is killed.
    with tempfile.TemporaryDirectory(dir=arguments.out, ignore_cleanup_errors=True) as folder:
        run = StageRun(arguments.kind, arguments.scale, arguments.ranks, Path(folder))
        try:
            _run(run, arguments.function, starts_jobs=arguments.starts_jobs)
        except StageSkipped as reason:
            RankOutcome({}, skipped=str(reason)).write(path)
        except PeerFailed:
            # The rank that failed first has the reason.
            return 1
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            run.faults.append(_reason(error))
            run.outcome().write(path)
            return 1
        else:
            run.outcome().write(path)
    return 0


def _run(run: StageRun, name: str, *, starts_jobs: bool) -> None:
    module, _, function = name.partition(":")
    stage = getattr(importlib.import_module(module), function)
    if starts_jobs:
        stage(run)
        return
    with open_world(run.kind, _LONGEST_WAIT_SECONDS) as world:
        run.joined = world
        stage(run)


def _reason(error: Exception) -> str:
    """Describe an error in one line; for a failed job, the last one of its log, which names the cause."""
    lines = error.log.split("\n") if isinstance(error, CommandFailed) else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last or cause_of(error)


if __name__ == "__main__":
    raise SystemExit(main())
