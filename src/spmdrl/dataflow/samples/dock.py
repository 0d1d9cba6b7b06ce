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
from spmdrl.dataflow.samples.transport.several_nodes import SeveralNodes
from spmdrl.dataflow.samples.volume import Volume
from spmdrl.nouns.batch import WorkerState
from spmdrl.nouns.partition import ROWS, TOKENS, RowCost
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World


class TransferDock:
    """Dock with one open batch of samples at a time. Construction is collective over all ranks.

    As a context manager it leaves in order, or after an error without waiting. `needs_by_state` has the columns that
    each worker state of the run reads, the update's included; `cost` is the quantity shared out equally; `row_groups`
    has the states in which ranks work on the same rows, `whole_groups` those in which a rank gets all remaining rows of
    a prompt; with `shares_prompts` a rank computes the prompt of a group's rows once. Each batch adds its response
    lengths to `history`.
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
    ):
        if WorkerState.UPDATE not in needs_by_state:
            raise ValueError("the dock's states lack the update, so no row could ever be trained; add what it reads")
        needs = {state: frozenset(names) for state, names in needs_by_state.items()}
        warehouse, volume = Warehouse(open_pool(world)), Volume()
        payload = (
            OneNode(warehouse, volume)
            if world.num_nodes == 1
            else SeveralNodes(
                warehouse, volume, world, config.timeout_seconds,
                locality=config.locality, plain_tcp=config.network == "tcp",
            )
        )  # fmt: skip
        if config.balance == "rows":
            cost, shares_prompts = ROWS, False
        rules = DealRules(
            world.launch, seed, cost, config.locality, row_groups or {}, frozenset(whole_groups), shares_prompts
        )
        self._parts = DockParts(world, needs, rules, warehouse, payload, volume, history or LengthHistory())
        self._open: Samples | None = None

    @property
    def volume(self) -> Volume:
        """Bytes that this rank has moved so far, by link and column."""
        return self._parts.volume

    @property
    def held_bytes(self) -> int:
        """Host memory that this rank's rows take."""
        return self._parts.warehouse.held_bytes

    def open_batch(self, step: int, prompts: Sequence[Prompt], group_size: int, holders: Sequence[int] = ()) -> Samples:
        """Open the samples of a step: `group_size` responses to each prompt, the same on every rank. Local.

        The first groups may be pending ones, which the ranks `holders` continue.
        """
        if self._open is not None:
            raise ValueError(f"the batch of step {self._open.step} is still open; close it before opening step {step}")
        parts = self._parts
        rows = StepRows(
            parts.needs_by_state, parts.rules, step, prompts, group_size,
            expected_G=parts.history.expected(prompts), holders=holders,
        )  # fmt: skip
        self._open = Samples(parts, rows)
        return self._open

    def close_batch(self, samples: Samples) -> Accounting:
        """Check that each row was trained, dropped or deferred, then forget all. Collective over all ranks.

        Raises RuntimeError for an unaccounted row, with its missing columns. Batches returned by `take` become invalid.
        """
        assert samples is self._open, f"step {samples.step} isn't the open batch"
        rows = samples.rows
        accounting = rows.lives.settled()
        self._parts.history.observe(rows.prompts, rows.response_lengths.reshape(-1, rows.group_size))
        # A slow rank may still read rows that this one no longer needs.
        barrier()
        self._parts.warehouse.clear()
        if self._parts.world.num_nodes > 1:
            # A fast rank must not store rows of the next batch on another node before that one has begun it. On its own
            # node it stores into its own file, which others read only after the next commit.
            barrier()
        self._open = None
        return accounting

    def close(self) -> None:
        """Leave in order. Collective over all ranks."""
        self._parts.payload.leave(graceful=True)

    def abandon(self) -> None:
        """Leave after a failure, without waiting for other ranks."""
        self._parts.payload.leave(graceful=False)

    def __enter__(self) -> TransferDock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
