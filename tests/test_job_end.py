"""The last line and the exit code of a job under torchrun, as its ranks leave them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spmdrl.job_end import first_end
from spmdrl.runtime.supervision.launcher import write_error_file
from tests.support.jobs import environment


def leave(logs: Path, attempt: int, rank: int, line: str, code: int, *, at: int) -> None:
    path = logs / "id_x" / f"attempt_{attempt}" / str(rank) / "error.json"
    write_error_file(line, code, {"TORCHELASTIC_ERROR_FILE": str(path)})
    os.utime(path, (at, at))


def test_the_rank_that_ended_first_in_the_last_attempt_counts(tmp_path):
    leave(tmp_path, 2, 0, "an attempt before", 2, at=1)
    leave(tmp_path, 10, 0, "a consequence", 75, at=9)
    leave(tmp_path, 10, 1, 'the "cause"', 124, at=8)
    assert first_end(tmp_path, 1) == ('the "cause"', 124)


def test_a_job_whose_ranks_left_nothing_ends_with_the_code_that_is_given(tmp_path):
    (tmp_path / "id_x" / "attempt_0" / "0").mkdir(parents=True)
    assert first_end(tmp_path, 75) == ("", 75)
    assert first_end(tmp_path / "none", 1) == ("", 1)


def test_a_script_gets_the_line_and_the_code_without_pytorch(tmp_path):
    leave(tmp_path, 0, 1, "spmdrl: rank 1: the cause", 77, at=1)
    command = [sys.executable, "-X", "importtime", "-m", "spmdrl.job_end", str(tmp_path), "1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 77 and done.stderr.splitlines()[-1] == "spmdrl: rank 1: the cause"
    assert "torch" not in done.stderr
