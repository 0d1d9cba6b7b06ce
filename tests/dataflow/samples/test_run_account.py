"""Over steps, kills and resumed runs every row is trained once, dropped once, or pending."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.dataflow.samples.row_lives import Accounting
from spmdrl.dataflow.samples.run_account import FILE, RunAccount
from spmdrl.engines.training.checkpoints.file_writes import written_at_once
from tests.support.jobs import finished, run_job, tiny_config

SIZE = 2
FATES = ("trained", "no_reward", "too_long")


def accounting(step: int, fates: list[str]) -> Accounting:
    return Accounting(step, fates.count("trained"), Counter(fates), fates.count("deferred"), 0, tuple(fates))


def due(account: RunAccount, number: int) -> list[int]:
    state = account.state
    return [*state.pending, *range(state.num_begun, state.num_begun + number)]


def one_step(account: RunAccount, random: Random) -> dict[int, str]:
    """What a step makes of each row of its groups."""
    step, groups = account.state.step + 1, due(account, random.randint(1, 3))
    account.open(step, groups)
    fates = []
    for _ in groups:
        is_deferred = random.random() < 0.3
        fates += ["deferred"] * SIZE if is_deferred else [random.choice(FATES) for _ in range(SIZE)]
    account.close(accounting(step, fates))
    rows = [group * SIZE + member for group in groups for member in range(SIZE)]
    return {row: fate for row, fate in zip(rows, fates, strict=True) if fate != "deferred"}


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), kills=st.lists(st.booleans(), min_size=1, max_size=12))
def test_no_kill_loses_or_doubles_a_row(tmp_path_factory, seed, kills):
    folder = tmp_path_factory.mktemp("checkpoint")
    random, account = Random(seed), RunAccount(SIZE, is_main=True)
    settled, saved = dict[int, str](), dict[int, str]()
    written_at_once(account, folder)
    for is_killed in kills:
        if is_killed:
            account, settled = RunAccount(SIZE, is_main=True), dict(saved)
            account.read_from(folder)
        made = one_step(account, random)
        assert not made.keys() & settled.keys()
        settled |= made
        if random.random() < 0.5:
            written_at_once(account, folder)
            saved = dict(settled)
        state = account.state
        pending = {group * SIZE + member for group in state.pending for member in range(SIZE)}
        assert settled.keys() | pending == set(range(state.num_begun * SIZE)) and not pending & settled.keys()
        counts = Counter(settled.values())
        assert (state.num_trained, state.num_dropped) == (counts.pop("trained", 0), counts)
    folder.joinpath(FILE).unlink()


def test_the_digest_is_of_every_row_of_every_step(tmp_path):
    accounts = [RunAccount(SIZE, is_main=True) for _ in range(3)]
    for number, account in enumerate(accounts):
        account.open(1, [0])
        account.close(accounting(1, ["trained", "no_reward" if number == 2 else "trained"]))
    digests = [account.state.digest for account in accounts]
    assert digests[0] == digests[1] != digests[2]


def test_rows_that_come_again_or_are_left_out_are_refused():
    account = RunAccount(SIZE, is_main=True)
    account.open(1, [0, 1])
    account.close(accounting(1, ["trained", "trained", "deferred", "deferred"]))
    for step, groups in [(2, [0, 1]), (2, [2]), (3, [1, 2]), (2, [1, 3])]:
        with pytest.raises(RuntimeError, match="would be lost or trained twice"):
            account.open(step, groups)
    account.open(2, [1, 2])
    with pytest.raises(RuntimeError, match="deferred in part"):
        account.close(accounting(2, ["trained", "deferred", "trained", "trained"]))


def test_an_account_that_does_not_add_up_is_damage_and_an_older_checkpoint_has_none(tmp_path):
    account = RunAccount(SIZE, is_main=True)
    one_step(account, Random(0))
    (path,) = written_at_once(account, tmp_path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"num_trained": record["num_trained"] + 1}))
    with pytest.raises(ValueError, match="rows were begun, but there are"):
        account.read_from(tmp_path)
    path.unlink()
    fresh = RunAccount(SIZE, is_main=True)
    fresh.read_from(tmp_path)
    fresh.open(8, [3, 10, 11])
    assert fresh.state.pending == (3,) and fresh.state.num_begun == 10
    fresh.close(accounting(8, ["trained"] * 6))
    assert (fresh.state.num_begun, fresh.state.num_trained, fresh.state.num_unknown) == (12, 6, 18)


@pytest.mark.ranks
def test_checkpoints_have_the_account_of_partial_rollouts(tmp_path):
    run = tmp_path / "run"
    partial = ("rollout.partial_max_rounds=3", "rollout.partial_extra_prompts=4", "checkpoint.interval=1")
    finished(run_job("train", tiny_config(tmp_path), f"run.dir={run}", *partial, ranks=2))
    saved = [json.loads((run / f"checkpoints/step_00000{step}" / FILE).read_text()) for step in (2, 3)]
    assert [one["num_trained"] for one in saved] == [64, 96] and saved[0]["pending"] and not saved[1]["pending"]
    assert saved[0]["num_begun"] == 16 + len(saved[0]["pending"])
