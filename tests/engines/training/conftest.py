"""A world of one rank for the engine's plain tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spmdrl.resources.world import World, open_world


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    with open_world("cpu") as opened:
        yield opened
