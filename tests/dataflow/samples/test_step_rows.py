"""Every rank, with the same news, comes to the same shares of a step's rows; no rank is started for it."""

from __future__ import annotations

import numpy as np
import pytest

from spmdrl.dataflow.samples.balancing.dealing import DealRules
from spmdrl.dataflow.samples.catalogue import RowDrop, RowMetadata, announced_lengths
from spmdrl.dataflow.samples.row_lives import DEFERRED
from spmdrl.dataflow.samples.schema import columns_mask, needs_by_state
from spmdrl.dataflow.samples.step_rows import StepRows
from spmdrl.nouns.roles import WorkerState
from spmdrl.runtime.launch import LaunchEnvironment
from tests.dataflow.samples.flow import GROUP_SIZE, NUM_ROWS, make_prompts

NEEDS = needs_by_state({"advantages"})
NUM_RANKS = 4


def rows_on(rank: int) -> StepRows:
    """A step's rows as one of four ranks on two nodes has them."""
    launch = LaunchEnvironment(rank=rank, world_size=NUM_RANKS, local_rank=rank % 2, local_world_size=2)
    return StepRows(NEEDS, DealRules(launch, seed=1), 0, make_prompts(), GROUP_SIZE)


def made(rows, *names: str) -> RowMetadata:
    """News that rows have columns, the ragged ones as long as their row's number and one."""
    index, mask = np.array(sorted(rows), dtype=np.int64), columns_mask(names)
    return RowMetadata(index, mask, dict.fromkeys(announced_lengths(mask), index + 1))


def generate(rows: StepRows) -> list[int]:
    own = rows.deal_generation()
    rows.lives.finish(WorkerState.GENERATION)
    rows.lives.observe([made(range(NUM_ROWS), "response_ids", "finished")])
    return own


def test_all_ranks_share_out_all_rows_alike_and_whole_groups_stay_together():
    ranks = [rows_on(rank) for rank in range(NUM_RANKS)]
    generated = [generate(rows) for rows in ranks]
    assert sorted(sum(generated, [])) == list(range(NUM_ROWS))
    assert all(np.bincount(np.array(own) // GROUP_SIZE).max() == GROUP_SIZE for own in generated)
    assert [rows.take_generated(WorkerState.REWARD) for rows in ranks] == generated
    for rows in ranks:
        rows.lives.observe([made(range(NUM_ROWS), "reward")])
        rows.deal(WorkerState.ADVANTAGE)
    for rank, rows in enumerate(ranks):
        shares = rows.shares[WorkerState.ADVANTAGE]
        assert all(np.array_equal(shares[other], ranks[0].shares[WorkerState.ADVANTAGE][other]) for other in shares)
        assert np.array_equal(rows.share(WorkerState.ADVANTAGE), shares[rank])
        # With locality a row lives where it was generated.
        assert set(generated[rank]) <= set(rows.on_node(rank // 2).tolist())


def test_generation_gets_the_groups_that_it_may_have_and_no_others():
    ranks = [rows_on(rank) for rank in range(NUM_RANKS)]
    for rows in ranks:
        rows.admit(range(2, 5))
    assert {row // GROUP_SIZE for rows in ranks for row in rows.deal_generation()} == {2, 3, 4}


def test_a_row_of_another_rank_or_of_no_batch_is_refused():
    rows = rows_on(1)
    own = generate(rows)
    rows.check_own(WorkerState.GENERATION, np.array(own))
    foreign = next(row for row in range(NUM_ROWS) if row not in own)
    for wrong in (foreign, NUM_ROWS, -1):
        with pytest.raises(ValueError, match=f"rank 1 puts generation columns of row {wrong}, which it didn't take"):
            rows.check_own(WorkerState.GENERATION, np.array([*own, wrong]))


def test_portions_come_in_the_order_in_which_they_were_announced_and_the_rest_at_last():
    rows = rows_on(0)
    generate(rows)
    rows.portions += [np.array([5, 6]), np.array([0, 1])]
    rows.deal(WorkerState.REWARD, among=np.array([6]))
    found = [portion.tolist() for portion in rows.ready_portions(WorkerState.REWARD)]
    assert found == [[5], [0, 1], [2, 3, 4, *range(7, NUM_ROWS)]]


def test_dropped_rows_are_trained_no_more_and_deferred_ones_leave_the_step():
    rows = rows_on(0)
    generate(rows)
    rows.lives.observe([RowDrop(np.array([0, 9]), "late"), RowDrop(np.arange(4, 8), DEFERRED)])
    assert rows.to_train.tolist() == [*range(4), *range(8, NUM_ROWS)]
    assert rows.groups_to_train.tolist() == [0, 2, 3, 4, 5]
    assert rows.num_dropped == {"late": 2}


def test_imbalance_is_the_longest_share_of_generation_over_the_mean():
    rows = rows_on(0)
    generate(rows)
    loads = [sum(row + 1 for row in share.tolist()) for share in rows.shares[WorkerState.GENERATION].values()]
    assert rows.generation_imbalance() == pytest.approx(max(loads) * NUM_RANKS / sum(loads))


def test_a_state_takes_what_it_waits_for_and_nothing_else():
    rows = rows_on(0)
    assert rows.columns(WorkerState.UPDATE, None) == sorted(NEEDS[WorkerState.UPDATE])
    assert rows.columns(WorkerState.UPDATE, ["advantages"]) == ["advantages"]
    with pytest.raises(ValueError, match=r"update takes \['reward'\], which its controller doesn't wait for"):
        rows.columns(WorkerState.UPDATE, ["reward"])
