"""The rows of a step that are shown are of one prompt, to be compared, and of all others."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.stages.shown import chosen_places


@given(st.integers(0, 200), st.integers(0, 40))
def test_as_many_places_as_wanted_are_chosen_once_each_half_of_them_together(num_rows, wanted):
    places = chosen_places(num_rows, wanted)
    assert len(places) == len(set(places)) == min(wanted, num_rows) and places == sorted(places)
    assert all(0 <= place < num_rows for place in places)
    assert places[: len(places) // 2] == list(range(len(places) // 2))
    if len(places) > 1:
        gaps = [after - before for before, after in pairwise(places[len(places) // 2 :])]
        assert not gaps or max(gaps) - min(gaps) <= 1
