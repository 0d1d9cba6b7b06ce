"""Pipelined decoding steps on the device, each started before the host has read the previous one's tokens.

    rows --start--> running on the device --take--> tokens read, rows ended

The host's work on a step, from reading tokens to scheduling the next one, overlaps with the next step on the device. A
row that ends is therefore fed once more: that step's token for it is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdrl.engines.generation.native.fixed_step import (
    FedRow,
    FixedStep,
    StepIntegers,
    StepShape,
    padded_rows,
    padded_width,
)
from spmdrl.engines.generation.native.graph_steps import GraphSteps
from spmdrl.engines.generation.native.running_rows import Row
from spmdrl.engines.generation.native.sampling import RowDrawer, RowSampling
from spmdrl.engines.generation.protocol import Finish


@dataclass(frozen=True)
class _Started:
    """A step that the host hasn't read."""

    rows: list[Row]
    version: int
    integers: Tensor
    """Kept until the step is read: the device may still be copying them."""
    tokens_B: Tensor
    logprobs_B: Tensor
    copied: torch.Event | None
    """Recorded after both copies to the host; None if copies are synchronous."""


class StepPipeline:
    """Queue that starts steps and reads their tokens, in order."""

    def __init__(self, step: FixedStep, device: torch.device, drawer: RowDrawer, max_rows: int):
        self._step = step
        self._max_rows = max_rows
        self._integers = StepIntegers(0, ())
        self._graphs = GraphSteps(device, step)
        self._device = device
        self._drawer = drawer
        self._started: deque[_Started] = deque()
        self._sampling: tuple[list[Row], RowSampling] | None = None

    @property
    def num_bytes(self) -> int:
        return self._step.num_bytes + self._graphs.num_bytes

    @property
    def num_started(self) -> int:
        """Number of steps that the host hasn't read."""
        return len(self._started)

    def start(self, rows: list[Row], version: int, *, most_rows: int, most_blocks: int) -> None:
        """Start a step of these rows; `most_rows` and tables of `most_blocks` bound later steps until others join."""
        self._make_room(padded_width(most_blocks))
        sampling = self._sampling_of(rows)
        shape = StepShape(padded_rows(len(rows)), self._step.width, sampling.kinds)
        self._prepare(shape, replace(shape, num_rows=padded_rows(most_rows)))
        before = {id(row): place for place, row in enumerate(self._started[-1].rows)} if self._started else {}
        fed = [FedRow(row, before[id(row)] if row.num_ahead else None) for row in rows]
        integers = self._copied(self._integers.fill(fed, shape.num_rows))
        self._step.feed(integers)
        self._graphs.replay(shape)
        for row in rows:
            row.num_ahead += 1
        self._started.append(self._on_its_way(rows, version, integers))

    def take(self) -> list[tuple[Row, Finish]]:
        """Wait for the oldest step and append its tokens; returns the rows that end with them, with the reason."""
        step = self._started.popleft()
        if step.copied is not None:
            step.copied.synchronize()
        alive = [place for place, row in enumerate(step.rows) if row.num_ahead]
        rows = [step.rows[place] for place in alive]
        tokens, logprobs = step.tokens_B.tolist(), step.logprobs_B.tolist()
        for row in rows:
            row.num_ahead -= 1
        ended = self._drawer.append(
            rows, [tokens[place] for place in alive], [logprobs[place] for place in alive], step.version
        )
        for row, _ in ended:
            row.num_ahead = 0
        return ended

    def drop(self) -> None:
        """Forget the started steps: their rows keep the tokens read so far."""
        for step in self._started:
            for row in step.rows:
                row.num_ahead = 0
        self._started.clear()

    def forget(self) -> None:
        """Drop the graphs, because weights or cache move."""
        self._graphs.forget()

    def release(self) -> None:
        """Free all memory."""
        self.drop()
        self.forget()
        self._step.release()
        self._sampling, self._integers = None, StepIntegers(0, ())

    def _prepare(self, shape: StepShape, largest: StepShape) -> None:
        """Capture the shape, and before it the largest that can follow."""
        if not self._graphs.lacks(shape):
            return
        # A captured step may run, on padding, but the tokens drawn last are still needed.
        tokens_B, _ = self._step.drawn
        kept_B = tokens_B.clone()
        for wanted in dict.fromkeys((largest, shape)):
            if self._graphs.lacks(wanted):
                self._step.feed(self._copied(self._integers.fill([], wanted.num_rows)))
                self._graphs.capture(wanted)
        tokens_B.copy_(kept_B)

    def _make_room(self, width: int) -> None:
        """Allocate for such tables, keeping the newest step's tokens."""
        drawn = [values.clone() for values in self._step.drawn] if self._started else []
        if self._step.make_room(width):
            self._graphs.forget()
            self._sampling, self._integers = None, StepIntegers(self._max_rows, self._step.widths(width))
            for own, values in zip(self._step.drawn, drawn, strict=False):
                own.copy_(values)

    def _sampling_of(self, rows: list[Row]) -> RowSampling:
        if self._sampling is None or self._sampling[0] != rows:
            self._sampling = (rows, self._drawer.sampling_of(rows))
            self._step.set_sampling(self._sampling[1])
        return self._sampling[1]

    def _on_its_way(self, rows: Sequence[Row], version: int, integers: Tensor) -> _Started:
        """Start copying the newest step's results to the host; returns the step."""
        tokens_B, logprobs_B = (
            torch.empty(len(rows), dtype=drawn.dtype, pin_memory=self._device.type != "cpu").copy_(
                drawn[: len(rows)], non_blocking=True
            )
            for drawn in self._step.drawn
        )
        copied = None
        if self._device.type != "cpu":
            copied = torch.get_device_module(self._device).Event()
            copied.record()
        return _Started(list(rows), version, integers, tokens_B, logprobs_B, copied)

    def _copied(self, integers: Tensor) -> Tensor:
        """Return a copy that the device may read while the next one is written."""
        return torch.empty_like(integers, pin_memory=self._device.type != "cpu").copy_(integers)
