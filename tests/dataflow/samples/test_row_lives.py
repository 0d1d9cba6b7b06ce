from __future__ import annotations

import numpy as np
import pytest

from spmdrl.dataflow.samples.catalogue import RowDrop, RowMetadata, announced_lengths
from spmdrl.dataflow.samples.row_lives import DEFERRED, RowLives
from spmdrl.dataflow.samples.schema import columns_mask, needs_by_state
from spmdrl.dataflow.samples.store.keeping import restored, snapshot
from spmdrl.nouns.batch import WorkerState

NUM_ROWS, GROUP_SIZE = 8, 2
NEEDS = needs_by_state({"advantages"})


def homes_on(num_nodes: int) -> np.ndarray:
    """The home of each row: groups go round the nodes."""
    return np.arange(NUM_ROWS) // GROUP_SIZE % num_nodes


def metadata(rows, *names: str) -> RowMetadata:
    index, mask = np.array(sorted(rows), dtype=np.int64), columns_mask(names)
    lengths = dict.fromkeys(announced_lengths(mask), 10 * index + 1)
    return RowMetadata(index, mask, lengths)


def fresh(homes, needs=NEEDS) -> RowLives:
    """Lives of rows of which nothing is known yet."""
    return RowLives(needs, homes, step=5, group_size=GROUP_SIZE)


def born() -> RowLives:
    """Rows with their prompts, at home on two nodes."""
    lives = fresh(homes_on(2))
    rows, mask = np.arange(NUM_ROWS), columns_mask(["prompt_ids"])
    lives.observe([RowMetadata(rows, mask, {"prompt_ids": rows // GROUP_SIZE + 1})])
    return lives


def run_state(lives: RowLives, state: WorkerState, *made: str, rows=range(NUM_ROWS)) -> None:
    lives.claim(state, list(rows))
    lives.finish(state)
    lives.observe([metadata(rows, *made)] if made else [])


def advance_to_update(lives: RowLives) -> None:
    run_state(lives, WorkerState.GENERATION, "response_ids", "finished")
    run_state(lives, WorkerState.REWARD, "reward", "reward_verdict")
    run_state(lives, WorkerState.ADVANTAGE, "advantages")


def test_every_row_is_trained_dropped_or_pending():
    lives = born()
    advance_to_update(lives)
    assert lives.account().num_pending == NUM_ROWS
    lives.observe([RowDrop(np.array([1, 2]), "no reward"), RowDrop(np.array([3]), "late")])
    run_state(lives, WorkerState.UPDATE, rows=[0, 4, 5])
    # What was trained stays trained.
    lives.observe([RowDrop(np.array([0, 1]), "aborted")])
    account = lives.account()
    assert (account.step, account.num_trained, account.num_pending) == (5, 3, 2)
    assert account.num_dropped == {"aborted": 1, "late": 1, "no reward": 1}
    assert lives.trained_rows().tolist() == [0, 4, 5]
    assert lives.dropped_rows().tolist() == [1, 2, 3]
    assert lives.pending_rows().tolist() == [6, 7]


def test_deferred_rows_leave_the_batch_and_are_counted_apart():
    lives = born()
    run_state(lives, WorkerState.GENERATION, "response_ids", "finished", rows=[0, 1, 2, 3])
    lives.observe([RowDrop(np.array([4, 5, 6, 7]), DEFERRED), RowDrop(np.array([3]), "no reward")])
    run_state(lives, WorkerState.REWARD, "reward", "reward_verdict", rows=[0, 1, 2])
    run_state(lives, WorkerState.ADVANTAGE, "advantages", rows=[0, 1, 2])
    run_state(lives, WorkerState.UPDATE, rows=[0, 1, 2])
    account = lives.settled()
    assert (account.num_trained, account.num_deferred, account.num_pending) == (3, 4, 0)
    assert account.num_dropped == {"no reward": 1}
    assert lives.deferred_rows().tolist() == [4, 5, 6, 7] and lives.dropped_rows().tolist() == [3]
    kept = restored(snapshot(lives), fresh(lives.catalogue.homes))
    assert kept.settled() == account


def test_a_batch_settles_only_without_pending_rows():
    lives = born()
    run_state(lives, WorkerState.GENERATION, "response_ids")
    with pytest.raises(RuntimeError, match="step 5: 8 of 8 rows .* row 0 waits for columns advantages before update"):
        lives.settled()
    lives.observe([RowDrop(np.arange(NUM_ROWS), "all bad")])
    assert lives.settled().num_dropped == {"all bad": NUM_ROWS}


def fully_known(lives: RowLives) -> dict[str, list]:
    return {key: array.tolist() for key, array in snapshot(lives).items()}


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
def test_saved_lives_go_on_on_any_number_of_nodes(num_nodes):
    lives = born()
    run_state(lives, WorkerState.GENERATION, "response_ids", "finished")
    run_state(lives, WorkerState.REWARD, "reward", rows=[0, 1, 4])
    lives.observe([RowDrop(np.array([7]), "late"), RowDrop(np.array([2]), "broken \N{SNOWMAN}")])
    lives.claim(WorkerState.REWARD, [3, 5])
    again = restored(snapshot(lives), fresh(homes_on(num_nodes)))
    assert again.catalogue.homes.tolist() == homes_on(num_nodes).tolist()
    assert again.controllers[WorkerState.REWARD].ready_rows().tolist() == [3, 5, 6]
    assert again.controllers[WorkerState.ADVANTAGE].ready_rows().tolist() == [0, 1, 4]
    assert again.catalogue.lengths("response_ids").tolist() == lives.catalogue.lengths("response_ids").tolist()
    assert again.account() == lives.account()
    assert fully_known(again) == fully_known(lives)


def test_a_row_with_columns_of_an_unfinished_state_is_not_saved():
    lives = born()
    lives.claim(WorkerState.GENERATION, [4, 5])
    lives.observe([metadata([5], "response_ids")])
    with pytest.raises(ValueError, match="row 5 is claimed for generation, but has its columns already"):
        snapshot(lives)
    lives.finish(WorkerState.GENERATION)
    snapshot(lives)


def test_lives_of_other_states_are_not_restored():
    saved = snapshot(born())
    other = needs_by_state({"advantages", "ref_logprobs"})
    with pytest.raises(ValueError, match="saved with states advantage, generation, .* but the run has .*reference"):
        restored(saved, fresh(homes_on(1), other))
