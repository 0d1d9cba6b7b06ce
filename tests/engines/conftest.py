"""The exact mode, within one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from spmdrl.engines.models.kernels import ops
from tests.engines.models.delta_cases import need_library


@pytest.fixture
def exact_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operations of `debug.batch_invariant`, for one test."""
    need_library()
    threads = torch.get_num_threads()
    monkeypatch.setattr(ops, "TABLE", dict(ops.TABLE))
    ops.compute_batch_invariantly()
    yield
    torch.set_num_threads(threads)
