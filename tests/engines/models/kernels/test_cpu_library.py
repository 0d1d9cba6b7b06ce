"""The library of a CPU's operations is built once, for this user alone, and done without where it can't be."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.cpp import cpu_library as library
from tests.engines.models.kernels import test_row_attention
from tests.engines.models.kernels.test_paged_attention import CASES, pages, softmax_attention

pytestmark = pytest.mark.cpu_only(reason="it builds for the CPU")


@pytest.fixture(scope="module")
def usual() -> Path | None:
    """The library that is in the user's own cache folder, as other tests have it."""
    found = library.cpu_library()
    return None if found is None else Path(found._name)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cpu_library.cache_clear()
    yield tmp_path / "spmdrl"
    library.cpu_library.cache_clear()


def attends() -> None:
    arguments = pages(CASES[0], torch.float32)
    found = ops.paged_attention(*arguments).double()
    torch.testing.assert_close(found, softmax_attention(*arguments), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_it_is_built_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(map(shutil.which, library._COMPILERS)):
        pytest.skip("this machine has no C++ compiler")
    assert library.cpu_library() is not None
    (built,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    library.cpu_library.cache_clear()
    monkeypatch.setattr(library, "_build", lambda *_: pytest.fail("it is built a second time"))
    assert library.cpu_library() is not None
    attends()
    assert list(folder.iterdir()) == [built]


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["znver3", "haswell"])
def test_its_bits_dont_depend_on_what_the_compiler_tunes_for(
    processor: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("g++")
    if compiler is None or "avx2" not in library._processor():
        pytest.skip("needs g++ and a processor with AVX2")
    other = tmp_path / "other++"
    other.write_text(f'#!/bin/bash\nexec {compiler} "${{@/-march=native/-march=x86-64-v3}}" -mtune={processor}\n')
    other.chmod(0o700)
    monkeypatch.setenv("CXX", str(other))
    test_row_attention.test_cached_positions_have_the_bits_of_whole_rows((4, 2, 32, 32), 32)
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_others_write_to_isn_t_read(
    usual: Path | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if usual is not None:
        monkeypatch.setattr(library, "_build", lambda _, built: shutil.copy(usual, built))
    folder.mkdir()
    os.chmod(folder, 0o777)
    (folder / "planted.so").touch()
    if library.cpu_library() is not None:
        attends()
    assert [path.name for path in folder.iterdir()] == ["planted.so"]


def test_without_a_compiler_pytorch_s_operations_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert not ops.reads_pages(torch.device("cpu"))
    assert "no C++ compiler was found" in caplog.text
    attends()


def test_a_compiler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken++"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING):
        assert not ops.reads_pages(torch.device("cpu"))
    assert "broken++ can't build" in caplog.text and "it is broken" in caplog.text
    attends()
