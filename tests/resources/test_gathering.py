from __future__ import annotations

import pytest
from tests.support.ranks import run_ranks

from spmdrl.resources.collectives import gather_bytes

LENGTHS = [(0, 0), (3, 0), (8192, 8192), (8193, 1), (5, 100_000), (100_000, 100_001)]


def payload_of(rank: int, length: int) -> bytes:
    return bytes([rank + 1]) * length


def gathered_by(world) -> list[list[bytes]]:
    return [gather_bytes(payload_of(world.rank, lengths[world.rank])) for lengths in LENGTHS]


@pytest.mark.ranks
def test_short_and_long_payloads_reach_every_rank():
    """Two ranks' payloads of up to 8,192 bytes travel in one round."""
    expected = [[payload_of(rank, length) for rank, length in enumerate(lengths)] for lengths in LENGTHS]
    assert run_ranks(2, gathered_by) == [expected, expected]
