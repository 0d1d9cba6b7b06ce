"""The command line of benches answers at once: what a bench needs is imported when it runs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from tests.support.jobs import environment

from spmdrl.bench.cli import BENCHES, bench_named, docstring_of, main


def test_help_imports_no_torch():
    look = """
import sys
from spmdrl.bench.cli import main
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
        module = importlib.import_module(f"spmdrl.bench.{module}")
        assert docstring_of(name).splitlines()[0] == (module.__doc__ or "").strip().splitlines()[0]
        assert callable(bench_named(name).add_arguments) and callable(bench_named(name).run)


def test_a_bench_that_is_not_there_is_refused_with_those_that_are(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["speed"])
    assert "metadata" in capsys.readouterr().err
