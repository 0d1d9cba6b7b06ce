"""The rows of a step that are shown are of one prompt, to be compared, and of all others."""

from __future__ import annotations

import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.host_waits import HostWaits

from spmdrl.dataflow.stages.update_report import ShownRows, chosen_places, piece_keys, row_of


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


def test_of_many_microbatches_the_shown_rows_are_kept_and_read_with_one_wait(device):
    shown = ShownRows(2)
    shown.begin_step(np.arange(4, 10), group_size=2)
    for row, logprobs in ((4, [-1.0, -2.0]), (-1, [-3.0]), (5, [-0.5]), (-1, [-4.0, -5.0])):
        pieces_R = piece_keys(torch.tensor([row])).repeat(len(logprobs)).to(device)
        shown.add(pieces_R, torch.tensor(logprobs, device=device), torch.zeros(len(logprobs), device=device))
    with HostWaits() as host:
        shown.gather()
    assert shown.rows == [4, 5]
    assert [shown.logprobs(row) for row in (4, 5, 6)] == [[-1.0, -2.0], [-0.5], None]
    assert host.all.total() == (device.type != "cpu")


def test_a_rows_tokens_are_put_together_in_order_from_pieces_in_any_micro_batch():
    keys = piece_keys(torch.tensor([7, 7, 3, 3, 3]))
    assert row_of(keys).tolist() == [7, 7, 3, 3, 3] and keys[0] < keys[1] and keys[2] < keys[3] < keys[4]
    shown = ShownRows(8)
    shown.begin_step(np.arange(8), group_size=2)
    for places in ([4, 1], [2], [0, 3]):
        pieces_R = keys[places].repeat_interleave(2)
        logprobs_R = torch.tensor([[float(place), place + 0.5] for place in places]).flatten()
        shown.add(pieces_R, logprobs_R, logprobs_R)
    shown.gather()
    assert shown.logprobs(7) == [0.0, 0.5, 1.0, 1.5] and shown.logprobs(3) == [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]


@pytest.mark.parametrize("wanted", [0, 1])
def test_nothing_of_a_step_is_kept_beyond_it(wanted):
    shown, logprobs_R = ShownRows(wanted), torch.zeros(2)
    kept = weakref.ref(logprobs_R)
    shown.begin_step(np.arange(4), group_size=2)
    shown.add(torch.tensor([0, 0]), logprobs_R, logprobs_R)
    del logprobs_R
    shown.gather()
    assert kept() is None
