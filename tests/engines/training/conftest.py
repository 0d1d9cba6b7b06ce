"""A world of one rank for the engine's plain tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spmdrl.resources.world import World, open_world
from tests.support.chosen_device import chosen_kind


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    with open_world(chosen_kind()) as opened:
        yield opened
