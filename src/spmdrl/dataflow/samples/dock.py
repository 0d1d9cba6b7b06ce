"""The transfer dock, which opens a batch of samples for a step, and accounts for every row at the step's end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.balancing.dealing import DealRules, RowGroups
from spmdrl.dataflow.samples.balancing.length_history import LengthHistory
from spmdrl.dataflow.samples.row_lives import Accounting
from spmdrl.dataflow.samples.samples import DockParts, Samples
from spmdrl.dataflow.samples.step_rows import StepRows
from spmdrl.dataflow.samples.store.shared_memory import open_pool
from spmdrl.dataflow.samples.store.warehouse import OneNode, Warehouse
from spmdrl.dataflow.samples.transport.several_nodes import RemoteWarehouses, SeveralNodes
from spmdrl.dataflow.samples.volume import Volume
from spmdrl.nouns.batch import WorkerState
from spmdrl.nouns.partition import ROWS, TOKENS, RowCost
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.collectives import barrier
from spmdrl.resources.rank_sets import RankSets, all_ranks
from spmdrl.resources.world import World


class TransferDock:
    """Dock with as many open batches of samples as it has places. Construction is collective over all ranks.

    As a context manager it leaves in order, or after an error without waiting. `needs_by_state` has the columns that
    each worker state of the run reads, the update's included; `cost` is the quantity shared out equally; `row_groups`
    has the states in which ranks work on the same rows, `whole_groups` those in which a rank gets all remaining rows of
    a prompt; with `shares_prompts` a rank computes the prompt of a group's rows once. Each batch adds its response
    lengths to `history`. `sets` has the ranks that generate and those that train, if these aren't the same.
    """

    def __init__(
        self,
        world: World,
        needs_by_state: Mapping[WorkerState, Iterable[str]],
        config: DockConfig,
        *,
        seed: int = 0,
        cost: RowCost = TOKENS,
        row_groups: Mapping[WorkerState, RowGroups] | None = None,
        whole_groups: Iterable[WorkerState] = (),
        shares_prompts: bool = False,
        history: LengthHistory | None = None,
        sets: RankSets | None = None,
        num_places: int = 1,
    ):
        if WorkerState.UPDATE not in needs_by_state:
            raise ValueError("the dock's states lack the update, so no row could ever be trained; add what it reads")
        needs = {state: frozenset(names) for state, names in needs_by_state.items()}
        sets = sets or all_ranks(world)
        if config.balance == "rows":
            cost, shares_prompts = ROWS, False
        rules = DealRules(
            world.launch, seed, cost, config.locality, row_groups or {}, frozenset(whole_groups), shares_prompts,
            others=sets.update.ranks if sets.are_apart else None,
        )  # fmt: skip
        volume, history = Volume(), history or LengthHistory()
        warehouses, remote = [Warehouse(open_pool(world)) for _ in range(num_places)], None
        if world.num_nodes > 1:
            remote = RemoteWarehouses(warehouses, world, config.timeout_seconds, plain_tcp=config.network == "tcp")
        self._places: list[DockParts] = []
        for place, warehouse in enumerate(warehouses):
            payload = (
                OneNode(warehouse, volume)
                if remote is None
                else SeveralNodes(place, volume, world, remote, locality=config.locality)
            )
            self._places.append(DockParts(world, needs, rules, warehouse, payload, volume, history, sets))
        self._open: dict[int, Samples] = {}
        """open batches by step"""

    @property
    def volume(self) -> Volume:
        """Bytes that this rank has moved so far, by link and column."""
        return self._places[0].volume

    @property
    def held_bytes(self) -> int:
        """Host memory that this rank's rows take."""
        return sum(place.warehouse.held_bytes for place in self._places)

    def open_batch(self, step: int, prompts: Sequence[Prompt], group_size: int, holders: Sequence[int] = ()) -> Samples:
        """Open the samples of a step: `group_size` responses to each prompt, the same on every rank. Local.

        The first groups may be pending ones, which the ranks `holders` continue.
        """
        parts = self._place_of(step)
        taken = [other for other in self._open if self._place_of(other) is parts]
        if taken:
            raise ValueError(f"the batch of step {taken[0]} is still open; close it before opening step {step}")
        rows = StepRows(
            parts.needs_by_state, parts.rules, step, prompts, group_size,
            expected_G=parts.history.expected(prompts), holders=holders,
        )  # fmt: skip
        self._open[step] = Samples(parts, rows)
        return self._open[step]

    def close_batch(self, samples: Samples) -> Accounting | None:
        """Check that each row was trained, dropped or deferred, then forget all. Collective over all ranks.

        Raises RuntimeError for an unaccounted row, with its missing columns. Batches returned by `take` become invalid.
        Ranks that only generate don't know what became of the rows, and return None.
        """
        assert samples is self._open.get(samples.step), f"the batch of step {samples.step} isn't open"
        rows, parts = samples.rows, self._place_of(samples.step)
        accounting = rows.lives.settled() if parts.sets.update.is_member else None
        parts.history.observe(rows.prompts, rows.response_lengths.reshape(-1, rows.group_size))
        # A slow rank may still read rows that this one no longer needs.
        barrier()
        parts.warehouse.clear()
        if parts.world.num_nodes > 1:
            # A fast rank must not store rows of the next batch on another node before that one has begun it. On its own
            # node it stores into its own file, which others read only after the next commit.
            barrier()
        del self._open[samples.step]
        return accounting

    def _place_of(self, step: int) -> DockParts:
        return self._places[step % len(self._places)]

    def close(self) -> None:
        """Leave in order. Collective over all ranks."""
        for place in self._places:
            place.payload.leave(graceful=True)

    def abandon(self) -> None:
        """Leave after a failure, without waiting for other ranks."""
        for place in self._places:
            place.payload.leave(graceful=False)

    def __enter__(self) -> TransferDock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
