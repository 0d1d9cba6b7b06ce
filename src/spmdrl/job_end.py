"""The last line and exit code of a job under torchrun, for scripts: `python -m spmdrl.job_end LOG_DIR CODE`.

torchrun ends with 1 whatever its ranks end with, and with pages of its own. LOG_DIR is its --log-dir, below which each
rank writes its end; CODE is the exit code if none has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spmdrl.runtime.screen import show


def first_end(logs: Path, code: int) -> tuple[str, int]:
    """Line and exit code of the rank that ended first in the last attempt; no line and `code` if no rank wrote any."""
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda folder: int(folder.name.removeprefix("attempt_")))
    ends = sorted(attempts[-1].glob("*/error.json"), key=lambda path: path.stat().st_mtime_ns) if attempts else []
    if not ends:
        return "", code
    end = json.loads(ends[0].read_text(encoding="utf-8"))["message"]
    return end["message"], end["errorCode"]


if __name__ == "__main__":
    line, exit_code = first_end(Path(sys.argv[1]), int(sys.argv[2]))
    if line:
        show(line, stream=sys.stderr)
    raise SystemExit(exit_code)
