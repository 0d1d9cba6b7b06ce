"""What ranks gather of each other, of any lengths and dtypes."""

from __future__ import annotations

import pytest
import torch
from tests.support.ranks import run_ranks
from torch import Tensor

from spmdrl.resources.collectives import gather_ragged_columns
from spmdrl.resources.world import World

pytestmark = pytest.mark.ranks


def columns_of(rank: int) -> list[Tensor]:
    """Of odd numbers of bytes, so that no column behind the first begins where its dtype would; some are empty."""
    return [
        torch.arange(3 * rank) % 2 == 0,
        torch.arange(5 - rank).double() / 3,
        torch.full((rank,), rank, dtype=torch.int32),
        torch.arange(8)[rank::2],
    ]


def gathered(world: World) -> list[list[Tensor]]:
    return gather_ragged_columns(columns_of(world.rank))


def test_columns_of_several_dtypes_arrive_as_they_were_sent() -> None:
    for answers in run_ranks(2, gathered):
        for rank, columns in enumerate(answers):
            for column, sent in zip(columns, columns_of(rank), strict=True):
                assert column.dtype == sent.dtype and torch.equal(column, sent)
