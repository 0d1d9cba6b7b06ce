"""Random lives of rows over steps, kills and restores: each row is trained once, dropped once, or pending."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import numpy as np

from spmdrl.dataflow.samples.catalogue import RowDrop, RowMetadata, announced_lengths
from spmdrl.dataflow.samples.row_lives import DEFERRED, RowLives
from spmdrl.dataflow.samples.run_account import RunAccount
from spmdrl.dataflow.samples.schema import RULES, columns_mask, needs_by_state
from spmdrl.dataflow.samples.store.keeping import restored, snapshot
from spmdrl.engines.training.checkpoints.file_writes import written_at_once
from spmdrl.nouns.roles import WorkerState
from tests.bench.faults.fault_tally import Tally

_SIZE = 2
_NEEDS = needs_by_state({"advantages"})
_STATES = (WorkerState.GENERATION, WorkerState.REWARD, WorkerState.ADVANTAGE, WorkerState.UPDATE)


def sequences(root: Path, *, count: int) -> list[Tally]:
    """So many random sequences of put, take, commit, drop, defer, save, kill and restore."""
    tally = Tally("R12", "random put, take, commit, kill and restore sequences")
    for seed in range(count):
        with tally.timed(f"sequence {seed}") as problems:
            problems += _one_run(root, Random(seed))  # noqa: S311 - no secret
    return [tally]


def _one_run(folder: Path, random: Random) -> list[str]:
    account, settled, saved = RunAccount(_SIZE, is_main=True), Counter[int](), Counter[int]()
    written_at_once(account, folder)
    for _ in range(random.randint(2, 6)):
        if random.random() < 0.3:
            account, settled = RunAccount(_SIZE, is_main=True), saved.copy()
            account.read_from(folder)
        settled += _one_step(account, random)
        if random.random() < 0.5:
            written_at_once(account, folder)
            saved = settled.copy()
        pending = {group * _SIZE + member for group in account.state.pending for member in range(_SIZE)}
        rows = set(range(account.state.num_begun * _SIZE))
        if settled.keys() | pending != rows or settled.keys() & pending or any(times > 1 for times in settled.values()):
            return [f"rows {sorted(rows)}, pending {sorted(pending)}, settled {dict(settled)}"]
    return []


def _one_step(account: RunAccount, random: Random) -> Counter[int]:
    """Takes the rows of a step through all states; returns how often each was settled."""
    state = account.state
    groups = [*state.pending, *range(state.num_begun, state.num_begun + random.randint(1, 3))]
    account.open(state.step + 1, groups)
    homes = np.zeros(len(groups) * _SIZE, dtype=np.int64)
    lives = RowLives(_NEEDS, homes, step=state.step + 1, group_size=_SIZE)
    lives.observe([_metadata(np.arange(homes.size), ("prompt_ids",))])
    for worker in _STATES:
        lives = _work(lives, worker, homes, random)
    accounting = account.close(lives.settled())
    rows = [group * _SIZE + member for group in groups for member in range(_SIZE)]
    return Counter(row for row, fate in zip(rows, accounting.fates, strict=True) if fate != DEFERRED)


def _work(lives: RowLives, worker: WorkerState, homes: np.ndarray, random: Random) -> RowLives:
    """One state takes all ready rows in parts, makes their columns or drops them; a kill in it loses what it did."""
    before = snapshot(lives)
    while (ready := lives.controllers[worker].ready_rows()).size:
        taken = np.sort(random.sample(ready.tolist(), random.randint(1, ready.size)))
        lives.claim(worker, taken)
        if random.random() < 0.1:
            lives = restored(before, RowLives(_NEEDS, homes, step=lives.step, group_size=_SIZE))
            continue
        names = tuple(rule.name for rule in RULES if rule.made_by is worker and rule.name in _MADE[worker])
        if names:
            lives.observe([_metadata(taken, names)])
        if worker is not WorkerState.UPDATE and random.random() < 0.2:
            lives.observe([RowDrop(taken[:1], random.choice(("no_reward", "too_long")))])
        lives.finish(worker)
    if worker is WorkerState.GENERATION and random.random() < 0.5:
        first = random.randrange(homes.size // _SIZE) * _SIZE
        rows = np.arange(first, first + _SIZE)
        if not lives.catalogue.is_dropped[rows].any():
            lives.observe([RowDrop(rows, DEFERRED)])
    return lives


_MADE = {
    WorkerState.GENERATION: ("response_ids", "rollout_logprobs"),
    WorkerState.REWARD: ("reward",),
    WorkerState.ADVANTAGE: ("advantages",),
    WorkerState.UPDATE: (),
}


def _metadata(rows: np.ndarray, names: tuple[str, ...]) -> RowMetadata:
    mask = columns_mask(names)
    return RowMetadata(rows, mask, dict.fromkeys(announced_lengths(mask), rows + 1))
