"""The rows of a step that are shown are of one prompt, to be compared, and of all others."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.stages.update_report import chosen_places


@given(st.integers(0, 200), st.integers(0, 40), st.integers(1, 16))
def test_as_many_places_as_wanted_are_chosen_once_each_those_of_the_first_group_before_others(
    num_rows, wanted, group_size
):
    places = chosen_places(num_rows, wanted, group_size)
    assert len(places) == len(set(places)) == min(wanted, num_rows) and places == sorted(places)
    assert all(0 <= place < num_rows for place in places)
    together = min(group_size, len(places))
    assert places[:together] == list(range(together))
    gaps = [after - before for before, after in pairwise(places[together:])]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_without_a_number_all_responses_to_one_prompt_are_chosen_and_a_few_others():
    assert chosen_places(128, None, 8) == [*range(8), 8, 38, 68, 98]
    assert chosen_places(8, None, 8) == list(range(8))
