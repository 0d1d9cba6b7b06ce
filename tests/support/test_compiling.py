"""How the simulated device is compiled, with a stand-in for the compiler that only leaves traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.ranks import end, fork
from tests.support.simulated_accelerator import compiling, why_not


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the stand-in notes its calls; it writes its own name where its output belongs."""
    noted, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho call >> {noted}\nfor last; do output=$last; done\nsleep 0.05\necho "$0" > "$output"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return noted


def _build(environment: dict[str, str], out: Path) -> None:
    os.environ.update(environment)
    out.write_text(str(compiling.built()))


def test_of_processes_that_need_it_at_once_one_compiles(calls: Path, tmp_path: Path) -> None:
    # Not forked from this process: children would lack the threads of what earlier tests left in PyTorch, and abort.
    outs = [tmp_path / f"library_{index}" for index in range(3)]
    processes = [fork(_build, dict(os.environ), out) for out in outs]
    for process in processes:
        end(process, grace_seconds=60)
    (library,) = {Path(out.read_text()) for out in outs}
    assert calls.read_text().split() == ["call"]
    # Nothing but the library and its lock is left.
    assert {path.suffix for path in library.parent.iterdir()} == {".so", ".lock"}


def test_a_compiler_that_fails_is_quoted_and_leaves_no_library(calls: Path, tmp_path: Path) -> None:
    (tmp_path / "compiler").write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="no such header"):
        compiling.built()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_another_compiler_compiles_anew(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiling.built()
    (tmp_path / "compiler").rename(tmp_path / "other")
    monkeypatch.setenv("CXX", str(tmp_path / "other"))
    assert compiling.built() != first and first.is_file()


def test_without_a_compiler_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no no-such-compiler" in (why_not() or "")
