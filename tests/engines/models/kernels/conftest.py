"""What tests of the kernels in Triton share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest

from tests.engines.models.kernels.interpreter import Interpreter


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreter]:
    if find_spec("triton") is None:
        pytest.skip("triton isn't installed; it comes with torch's CUDA builds")
    # Read when Triton is imported.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield Interpreter(process)
