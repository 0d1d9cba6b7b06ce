"""Whether a run swaps follows from its mode and the agreed sizes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.job.model.swap_choice import Residence, StateBytes

GIB = 1 << 30
SMALL = StateBytes(
    models=6 * GIB, gradients=2 * GIB, generation_weights=1 * GIB, kv_cache=3 * GIB, bucket=GIB // 16
)  # fmt: skip


def test_gradients_and_generation_take_turns():
    assert SMALL.together == 6 * GIB + 4 * GIB + GIB // 16
    assert replace(SMALL, kv_cache=0, generation_weights=0).together == 8 * GIB
    assert replace(SMALL, models=7 * GIB, program=GIB).together == SMALL.together + 2 * GIB


@given(st.integers(0, 1 << 50), st.integers(-(1 << 50), 1 << 50))
def test_auto_swaps_exactly_where_the_state_does_not_fit_and_the_other_modes_whatever_fits(needed, room):
    assert Residence("auto", needed, room).swaps == (needed > room)
    assert Residence("always", needed, room).swaps
    assert not Residence("never", needed, room).swaps


@pytest.mark.parametrize("owner", [name for name in vars(SMALL) if name != "gradients"])
def test_more_bytes_of_any_owner_never_end_a_swap(owner):
    more = replace(SMALL, **{owner: getattr(SMALL, owner) + GIB})
    assert more.together == SMALL.together + GIB
    assert not Residence("auto", SMALL.together, SMALL.together).swaps
    assert Residence("auto", more.together, SMALL.together).swaps


def test_the_decision_is_one_sentence_with_its_figures():
    fits, tight = (SMALL.together, 22 * GIB), (SMALL.together, 8 * GIB)
    assert Residence("auto", *fits).sentence == "swap: never needed, 10.1 of 22.0 GiB"
    assert Residence("auto", *tight).sentence == "swap: at every switch, else 10.1 of 8.0 GiB"
    assert "reshard.swap is always" in Residence("always", *fits).sentence
    assert Residence("never", *fits).sentence.startswith("swap: never, as reshard.swap is never")
    assert Residence("never", *tight).sentence.startswith("WARNING")
    assert Residence("auto", *tight).summary["swaps"] is True
