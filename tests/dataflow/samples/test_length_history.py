"""Prompts' own lengths decide who generates them: alike on every rank, and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.balancing.length_history import LENGTHS, LengthHistory
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.schema import needs_by_state
from spmdrl.engines.training.checkpoints.file_writes import written_at_once
from spmdrl.nouns.batch import WorkerState
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.world import World
from tests.dataflow.samples import flow
from tests.support.ranks import run_ranks


def prompt(name: str, num_tokens: int = 1) -> Prompt:
    return replace(flow.make_prompt([1] * num_tokens), id=name)


def test_groups_count_as_much_as_all_before_them_and_unseen_prompts_as_the_mean_of_the_others():
    history = LengthHistory()
    assert history.expected([prompt("a")]) is None
    history.observe([prompt("a"), prompt("b"), prompt("c")], np.array([[2, 4], [10, 11], [-1, -1]]))
    assert history.expected([prompt("a"), prompt("b"), prompt("c")]) == [3, 11, 7]
    history.observe([prompt("a")], np.array([[8, 10]]))
    assert history.expected([prompt("a"), prompt("b"), prompt("c")]) == [6, 11, 9]


def test_what_a_checkpoint_holds_goes_on_to_the_bit_and_an_old_one_begins_anew(tmp_path: Path):
    random = np.random.default_rng(0)
    names = [prompt(f"p{number}") for number in range(50)]

    def play(history: LengthHistory, steps: range) -> list[list[int] | None]:
        out = []
        for step in steps:
            of_step = [names[number] for number in np.random.default_rng(step).integers(0, 50, 8)]
            history.observe(of_step, np.random.default_rng((step, 1)).integers(0, 1000, (8, 3)))
            out.append(history.expected(names))
        return out

    whole, first = LengthHistory(is_main=True), LengthHistory(is_main=True)
    expected = play(whole, range(9))
    play(first, range(4))
    assert written_at_once(first, tmp_path) == [tmp_path / LENGTHS]
    assert written_at_once(LengthHistory(is_main=False), tmp_path) == []
    again = LengthHistory()
    again.observe(names, random.integers(0, 9, (50, 3)))
    again.read_from(tmp_path)
    assert play(again, range(4, 9)) == expected[4:]
    (tmp_path / LENGTHS).unlink()
    again.read_from(tmp_path)
    assert again.expected(names) is None and written_at_once(again, tmp_path) == []


def _two_steps(world: World, balance: str) -> list[list[int]]:
    """The groups that this rank generates in a first step and in a second one with the same prompts."""
    # Responses have 40 tokens in group 0 and one in the others.
    prompts, out = [prompt(f"p{group}") for group in range(flow.NUM_ROWS // flow.GROUP_SIZE)], []
    with TransferDock(
        world, needs_by_state({"advantages", "rollout_logprobs"}), DockConfig(20.0, balance=balance)
    ) as dock:
        for step in range(2):
            samples = dock.open_batch(step, prompts, flow.GROUP_SIZE)
            rows = samples.rows.deal_generation()
            out.append(sorted({row // flow.GROUP_SIZE for row in rows}))
            flow.generate(samples, rows, lambda row: [7] * (40 if row < flow.GROUP_SIZE else 1))
            out.append(
                [samples.rows.generation_imbalance(), samples.rows.expected_length(0), samples.rows.expected_length(5)]
            )
            samples.mark_dropped(rows, "done")
            samples.commit(WorkerState.GENERATION)
            dock.close_batch(samples)
    return out


@pytest.mark.ranks
def test_the_second_time_prompts_are_dealt_by_how_long_their_responses_were():
    one, other = run_ranks(2, _two_steps, "cost")
    assert len(one[0]) == len(other[0]) == 3
    (long,) = [groups for groups in (one[2], other[2]) if 0 in groups]
    # Short groups outnumber the long one by no more than caches are to hold.
    assert len(long) == 2 and len(one[2]) + len(other[2]) == 6
    assert one[3] == other[3] == [pytest.approx(2 * (40 + 1) / (40 + 5)), 40, 1]
    assert one[1] == [pytest.approx(2 * (40 + 2) / (40 + 5)), 0, 0]


@pytest.mark.ranks
def test_balance_by_rows_deals_equal_numbers_whatever_is_known():
    one, other = run_ranks(2, _two_steps, "rows")
    assert len(one[2]) == len(other[2]) == 3 and one[3][1] == 40
