"""Rows of one step: their takers for each worker state, their lengths, and their outcomes.

Nothing here communicates or holds payload. Ranks that make the same calls with the same news agree on every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.balancing.dealing import Dealer, DealRules, GroupLengths, Shares
from spmdrl.dataflow.samples.catalogue import RowMetadata
from spmdrl.dataflow.samples.row_lives import RowLives, RowStatus
from spmdrl.dataflow.samples.schema import PROMPT_COLUMNS, columns_mask
from spmdrl.nouns.batch import Integers
from spmdrl.nouns.roles import WorkerState

_NO_ROWS: Integers = np.empty(0, dtype=np.int64)


class StepRows:
    """Rows of one step. Row r is response r % group_size of prompt r // group_size.

    All shares are claimed on every rank, each by its own call: ready rows --deal--> shares --`lives.finish`--> consumed
    """

    def __init__(
        self, needs_by_state: Mapping[WorkerState, frozenset[str]], rules: DealRules, step: int,
        prompts: Sequence[Prompt], group_size: int, *, expected_G: Sequence[int] | None = None,
        holders: Sequence[int] = (),
    ):  # fmt: skip
        """`expected_G` are expected response tokens by prompt; None: unknown.

        The first groups are pending ones, which the ranks `holders` continue.
        """
        self.step = step
        self.prompts = prompts
        self.group_size = group_size
        self.num_rows = len(prompts) * group_size
        self.shares: dict[WorkerState, Shares] = {}
        """rows that each rank claimed last, by state"""
        self.portions: list[Integers] = []
        """rows announced together, of all ranks"""
        self._admitted = range(len(prompts))
        """groups admitted to generation"""
        self._rules = rules
        self._dealer = Dealer(rules, step, group_size)
        self._expected_G = expected_G
        self._own: dict[WorkerState, NDArray[np.bool_]] = {}
        """by state, True for rows that this rank claimed last [num_rows + 1]; built on demand"""
        homes = self._deal_groups(self._admitted, holders).repeat(group_size)
        self.lives = RowLives(needs_by_state, homes, step=step, group_size=group_size)
        lengths = np.array([len(prompt.prompt_ids) for prompt in prompts], dtype=np.int64).repeat(group_size)
        news = RowMetadata(np.arange(self.num_rows), columns_mask(PROMPT_COLUMNS), {"prompt_ids": lengths})
        self.lives.observe([news])

    def _deal_groups(self, groups: range, holders: Sequence[int] = ()) -> Integers:
        """Deal these groups for generation; returns their home nodes."""
        numbers = slice(groups.start, groups.stop)
        prompts = [len(prompt.prompt_ids) for prompt in self.prompts[numbers]]
        responses = None if self._expected_G is None else self._expected_G[numbers]
        return self._dealer.deal_groups(groups, GroupLengths(prompts, responses), holders)

    def prompt_of(self, row: int) -> Prompt:
        """Return the prompt that a row answers."""
        return self.prompts[row // self.group_size]

    def expected_length(self, row: int) -> int:
        """Return the expected tokens of the row's response; 0 for all rows if no prompt has been seen before."""
        return 0 if self._expected_G is None else self._expected_G[row // self.group_size]

    # Takers

    def admit(self, groups: range) -> None:
        """Admit only these groups to generation, shared out over all takers."""
        self._admitted = groups
        homes = self._deal_groups(groups)
        if self._rules.locality:
            rows = slice(groups.start * self.group_size, groups.stop * self.group_size)
            self.lives.catalogue.homes[rows] = homes.repeat(self.group_size)

    def deal_generation(self) -> list[int]:
        """Return the rows, in whole groups, for this rank to generate, with equal expected work for all takers.

        Ranks that generate together get the rows of the first, which alone puts the results.
        """
        state = WorkerState.GENERATION
        rows = self.lives.controllers[state].ready_rows(by_group=True)
        rows = rows[np.isin(rows // self.group_size, self._admitted)]
        self._claim(state, self._dealer.deal_generation(rows))
        groups = self._rules.row_groups.get(state)
        return self.share(state, None if groups is None else groups.leader).tolist()

    def deal(self, state: WorkerState, among: Integers | None = None) -> None:
        """Claim all rows ready for `state`, or those `among` these, in shares of equal cost."""
        ready = self.lives.controllers[state].ready_rows()
        rows = ready if among is None else ready[np.isin(ready, among)]
        self._claim(state, self._dealer.deal(state, rows, self.lives.catalogue))

    def take_generated(self, state: WorkerState) -> list[int]:
        """Claim all rows ready for `state` for the ranks that generated them; nothing moves."""
        generated = self.shares.get(WorkerState.GENERATION)
        assert generated is not None, f"{state.value} takes what ranks generated, but nothing was dealt for generation"
        ready = self.lives.controllers[state].ready_rows()
        self._claim(state, {rank: rows[np.isin(rows, ready)] for rank, rows in generated.items()})
        return self.share(state).tolist()

    def _claim(self, state: WorkerState, shares: Shares) -> None:
        self.lives.claim(state, np.concatenate([*shares.values(), _NO_ROWS]))
        self.shares[state] = shares
        self._own.pop(state, None)

    def share(self, state: WorkerState, rank: int | None = None) -> Integers:
        """Return the rows that a rank, by default this one, claimed last for `state`."""
        return self.shares.get(state, {}).get(self._rules.launch.rank if rank is None else rank, _NO_ROWS)

    def check_own(self, state: WorkerState, rows: Integers) -> None:
        """Raise ValueError for a row that this rank didn't claim for `state`."""
        own = self._own.get(state)
        if own is None:
            own = self._own[state] = np.zeros(self.num_rows + 1, dtype=np.bool_)
            own[self.share(state)] = True
        # The last entry, which is no row's, stands for rows that aren't in the batch.
        is_own = own.take(rows, mode="clip")
        if rows.size and (np.count_nonzero(is_own) < rows.size or rows.min() < 0):
            foreign, rank = rows[~is_own | (rows < 0)][0], self._rules.launch.rank
            raise ValueError(f"rank {rank} puts {state.value} columns of row {foreign}, which it didn't take")

    def reads(self, state: WorkerState) -> frozenset[str]:
        """Return the columns that rows must have before `state` gets them."""
        return self.lives.controllers[state].needs

    def columns(self, state: WorkerState, names: Iterable[str] | None) -> list[str]:
        """Return the columns for `state`: these, or all that it reads. Raises ValueError for any other."""
        needs = self.reads(state)
        undeclared = set(names or ()) - needs
        if undeclared:
            raise ValueError(
                f"{state.value} takes {sorted(undeclared)}, which its controller doesn't wait for; it waits for "
                f"{sorted(needs)}: add them to what the state needs"
            )
        return sorted(needs if names is None else names)

    def ready_portions(self, state: WorkerState) -> list[Integers]:
        """Return the rows that are ready for `state`: those announced together, in that order, then all others."""
        ready = self.lives.controllers[state].ready_rows()
        others = ready[~np.isin(ready, np.concatenate([*self.portions, _NO_ROWS]))]
        portions = [*(rows[np.isin(rows, ready)] for rows in self.portions), others]
        return [rows for rows in portions if rows.size]

    # Places and outcomes

    def on_node(self, node: int) -> Integers:
        """Return the rows that live on a node, ascending."""
        return np.flatnonzero(self.lives.catalogue.homes == node)

    @property
    def to_train(self) -> Integers:
        """The rows that this step is to train on, ascending: all but the deferred ones."""
        rows = np.arange(self.num_rows)
        return rows[~np.isin(rows, self.lives.deferred_rows())]

    @property
    def groups_to_train(self) -> Integers:
        """The groups that have rows left to train on, ascending."""
        return np.unique(np.flatnonzero(~self.lives.catalogue.is_dropped) // self.group_size)

    @property
    def num_dropped(self) -> Mapping[str, int]:
        """Rows dropped so far, by reason."""
        return self.lives.account().num_dropped

    @property
    def response_lengths(self) -> Integers:
        """Return response tokens by row [num_rows], -1 without a response."""
        return self.lives.catalogue.lengths("response_ids")

    def generation_imbalance(self) -> float:
        """Return the most response tokens of a replica over their mean; 1 where all have equally many."""
        shares = self.shares[WorkerState.GENERATION].values()
        loads = [int(self.response_lengths[rows].clip(min=0).sum()) for rows in shares]
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    def is_trained(self, row: int) -> bool:
        """True if the update has used this row."""
        return row in self.lives.controllers[WorkerState.UPDATE].rows_with(RowStatus.CONSUMED)
