"""Kernels of linear attention by turns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.models.delta_cases import need_library
from tests.engines.models.support import no_cpu_library


@pytest.fixture(params=["plain", "steps"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Chunks in plain PyTorch, and the CPU library's steps."""
    if request.param == "plain":
        with no_cpu_library():
            yield
    else:
        need_library()
        yield
