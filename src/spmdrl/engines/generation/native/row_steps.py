"""Steps of the native engine's rows: which rows run over which blocks of the cache, and their drawn tokens.

Shape letters: `B` rows, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.engines.generation.native.forward import CachedDecoder
from spmdrl.engines.generation.native.row_memory import BlockCopies, RowMemory
from spmdrl.engines.generation.native.running_rows import FedToken, Row
from spmdrl.engines.generation.native.sampling import RowDrawer
from spmdrl.engines.generation.native.scheduler import Admitted, Scheduler
from spmdrl.engines.generation.native.step_pipeline import StepPipeline
from spmdrl.engines.generation.protocol import Finish, Response
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.resources.mesh import Axis


class Lockstep:
    """Replicas that share experts: all must run a forward if any does; a single one needs no exchange."""

    def __init__(self, axis: Axis, device: torch.device):
        self._axis = axis
        self._device = device

    @property
    def is_alone(self) -> bool:
        return self._axis.size == 1

    def most(self, *counts: int) -> list[int]:
        """Return the largest of each count over the replicas. Collective over them."""
        if self.is_alone:
            return list(counts)
        return self._axis.max(torch.tensor(counts, device=self._device)).tolist()


class RowSteps:
    """Runner that starts rows, decodes one token per running row and step, and ends rows, in one cache's blocks."""

    def __init__(
        self, forward: CachedDecoder, drawer: RowDrawer, pipeline: StepPipeline | None, lockstep: Lockstep,
        rollout: RolloutConfig, *, shares_prefixes: bool,
    ):  # fmt: skip
        """With a `pipeline`, steps have a fixed shape, and one is started before the last one is read."""
        self.version = 0
        """version of the weights"""
        self.is_mid_step = False
        """True after a failed step"""
        self._forward = forward
        self._cache = forward.cache
        self._drawer = drawer
        self._pipeline = pipeline
        self._lockstep = lockstep
        self._rollout = rollout
        self._shares_prefixes = shares_prefixes
        self._new_schedule([1] * len(self._cache.kinds))

    def _new_schedule(self, num_blocks: Sequence[int]) -> None:
        self._memory = RowMemory(self._cache.kinds, num_blocks, self._rollout.block_size)
        # In a step of fixed shape each row has a place.
        merges_rows = self._pipeline is None
        self.scheduler = Scheduler(
            self._memory, self._rollout, shares_prefixes=self._shares_prefixes, merges_rows=merges_rows
        )

    def open(self, num_blocks: Sequence[int]) -> None:
        """Start over without rows, on a cache of this many blocks of each kind."""
        self._forget_graphs()
        self._cache.resize(num_blocks)
        self._new_schedule(num_blocks)
        self.is_mid_step = False

    def grow(self, wanted: Sequence[int], *, most: Sequence[int]) -> None:
        """Grow the cache to at least the wanted blocks of each kind, if there are fewer, and within the most."""
        present = self._cache.num_blocks
        if any(count > there for count, there in zip(map(min, wanted, most), present, strict=True)):
            # By a quarter at least: growing copies, and requests may come one at a time.
            larger = [max(count, there * 5 // 4) for count, there in zip(wanted, present, strict=True)]
            grown = list(map(min, larger, most))
            self._forget_graphs()
            self._cache.resize(grown)
            self._memory.grow(grown)

    def forget_weights(self) -> None:
        """Drop everything computed from the weights or tied to their addresses: they may change from here on."""
        self.scheduler.forget_prefixes()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        if self._pipeline is not None:
            self._pipeline.forget()

    def close(self) -> None:
        """Free the cache."""
        if self._pipeline is not None:
            self._pipeline.release()
        self._cache.free()

    def abort(self) -> list[Response]:
        """End all rows; returns them with their tokens so far."""
        if self._pipeline is not None:
            self._pipeline.drop()
        responses = self.scheduler.abort()
        if self.is_mid_step:
            # A failed step's content of the cache may not even be finite.
            num_blocks = self._cache.num_blocks
            self._cache.free()
            self.open(num_blocks)
        return responses

    def step(self) -> list[Response]:
        """Start the admitted rows, and decode all running ones; returns the rows that ended."""
        self.is_mid_step = True
        responses = self._start_rows(self.scheduler.admit())
        if self.scheduler.running or not self._lockstep.is_alone:
            responses += self._decode() if self._pipeline is None else self._decode_ahead(self._pipeline)
        self.is_mid_step = False
        return responses

    def _start_rows(self, admitted: Admitted) -> list[Response]:
        """Run the chunks, then draw the next token of each row that starts."""
        # Replicas that share experts all run a forward if one does.
        if any(self._lockstep.most(len(admitted.chunks))):
            self._forward.prefill(admitted.chunks)
        self._copy(admitted.copies)
        rows, logits = [], []
        for admission in admitted.admissions:
            logits_V = admission.group.logits_V
            assert logits_V is not None, f"the prompt of rows {[row.row for row in admission.rows]} was never run"
            admission.take_choices()
            rows += admission.rows
            logits.append(logits_V.expand(len(admission.rows), -1))
        return self._draw(rows, torch.cat(logits)) if rows else []

    def _decode(self) -> list[Response]:
        """Feed the newest token of every running row and draw the next."""
        self._make_room()
        rows = list(self.scheduler.running.values())
        fed = [FedToken(row, row.token_ids[-1], row.length) for row in rows if row.is_first]
        logits_BV = self._forward.decode(fed)
        if not fed:
            return []
        for token in fed:
            token.take_choices()
        if len(fed) < len(rows):
            place_of = {id(token.row.branch): place for place, token in enumerate(fed)}
            places_B = torch.tensor([place_of[id(row.branch)] for row in rows], device=logits_BV.device)
            logits_BV = logits_BV.index_select(0, places_B)
        return self._draw(rows, logits_BV)

    def _decode_ahead(self, pipeline: StepPipeline) -> list[Response]:
        """Start a step of the rows that continue, then read the previous step's tokens."""
        responses = []
        # Rows may be preempted, which needs all of their tokens.
        if self._memory.num_free_to_grow < len(self.scheduler.running):
            responses += self._read(pipeline, num_left=0)
        self._make_room()
        rows = self.scheduler.going_on()
        if rows:
            most_rows = min(self.scheduler.num_unfinished, self._rollout.max_running_rows)
            pipeline.start(rows, self.version, most_rows=most_rows, most_blocks=self.scheduler.widest_table())
        return responses + self._read(pipeline, num_left=1 if rows else 0)

    def _read(self, pipeline: StepPipeline, *, num_left: int) -> list[Response]:
        """Read all steps but the newest `num_left`; returns the rows that they ended."""
        responses = []
        while pipeline.num_started > num_left:
            responses += self._ended(pipeline.take())
        return responses

    def _make_room(self) -> None:
        self._copy(self.scheduler.make_room())

    def _copy(self, copies: Sequence[BlockCopies]) -> None:
        for place, pairs in enumerate(copies):
            self._cache.copy_blocks(place, pairs.sources, pairs.targets)

    def _draw(self, rows: list[Row], logits_BV: Tensor) -> list[Response]:
        """Draw one token per row; returns the rows that it ended."""
        responses = self._ended(self._drawer(rows, logits_BV, self.version))
        self._copy(self.scheduler.fork(rows))
        return responses

    def _ended(self, rows: list[tuple[Row, Finish]]) -> list[Response]:
        """Free the ended rows' blocks; returns their responses."""
        for row, _ in rows:
            self.scheduler.finish(row)
        return [row.response(finish) for row, finish in rows]
