"""The command line of benches answers at once: what a bench needs is imported when it runs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tests.bench.__main__ import BENCHES, bench_named, docstring_of, main
from tests.support.jobs import environment


def test_help_imports_no_torch():
    look = """
import sys
from tests.bench.__main__ import main
try:
    main(["--help"])
finally:
    assert "torch" not in sys.modules
"""
    job = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, env=environment())
    assert job.returncode == 0, job.stderr
    assert all(name in job.stdout for name in BENCHES)


def test_every_bench_has_the_help_of_its_module():
    for name, module in BENCHES.items():
        module = importlib.import_module(f"tests.bench.{module}")
        assert docstring_of(name).splitlines()[0] == (module.__doc__ or "").strip().splitlines()[0]
        assert callable(bench_named(name).add_arguments) and callable(bench_named(name).run)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("nodes --rows-per-node 30", "must be a multiple of 8, the responses per prompt; try 24"),
        ("samples --groups 0", "num_groups of the rows is 0, but must be >= 1; choose a larger one"),
        ("step --model m --prompts p --steps 1", "--steps 1 leaves no step after 1 of warm-up; raise it"),
        ("training --models nowhere", "nowhere"),
    ],
)
def test_sizes_that_cant_be_are_refused_in_one_line(command: str, message: str, capsys):
    assert main(command.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_a_bench_that_is_not_there_is_refused_with_those_that_are(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["speed"])
    assert "metadata" in capsys.readouterr().err
