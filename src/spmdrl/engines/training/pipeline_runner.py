"""Pipelined decoder stages on micro-batches, by PyTorch's schedules for training.

Stages exchange hidden states, forward, and their gradients, backward. The caller defines a stage's computation: every
rank of the axis has all micro-batches, and tokens and losses are looked up by number.

Shape letters: `T` tokens of a micro-batch that this rank holds between blocks, equally many in all; `D` model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.training.assignment import forward_order, layer_spans, microbatch_count, stage_numbers, stage_ranks
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import Axis

Compute = Callable[[Decoder, Tensor | None, int], Tensor]
"""(stage, its inputs, micro-batch) -> the stage's output [T, D]. The first stage's inputs are None: its tokens are
looked up. The last stage's output is a float32 scalar loss, or an evaluation's tensor."""


@dataclass(frozen=True)
class StageTask:
    """Work on micro-batches; those from `num_microbatches` on are idle."""

    compute: Compute
    num_microbatches: int
    hidden_TD: Tensor
    """Template of the hidden states between stages, without storage."""


class NumberedStage(nn.Module):
    """A stage that gets its micro-batch's number in a form that schedules can pass on."""

    task: StageTask | None

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder
        self.task = None

    def __call__(self, *inputs: Tensor, microbatch: Tensor) -> Tensor:
        # Read before FSDP's hooks move it to the device, where reading it would wait for all earlier work.
        output: Tensor = super().__call__(*inputs, microbatch=int(microbatch))
        return output

    def forward(self, *inputs: Tensor, microbatch: int) -> Tensor:
        assert self.task is not None, "a stage runs inside train or evaluate"
        hidden_TD = inputs[0] if inputs else None
        if microbatch >= self.task.num_microbatches:
            return self._pass(self.task.hidden_TD, hidden_TD)
        output = self.task.compute(self.decoder, hidden_TD, microbatch)
        # Schedules detach losses in place, which views don't allow.
        return output.clone() if self.decoder.span.heads else output

    def _pass(self, meta_TD: Tensor, hidden_TD: Tensor | None) -> Tensor:
        """Pass zeros through an idle micro-batch without any work; ends in a loss of zero."""
        if hidden_TD is None:
            return torch.zeros_like(meta_TD, device=next(self.parameters()).device, requires_grad=True)
        return (hidden_TD * 0).sum(dtype=torch.float32) if self.decoder.span.heads else hidden_TD.clone()


_OF_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_OF_SEVERAL_STAGES = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class PipelineRunner:
    """This rank's stages of a pipelined decoder, and their exchanges with its neighbours on the pipeline axis.

    FSDP2 may shard the stages. Their gradients are then reduced once, after the last micro-batch, and the decoders must
    be run through this runner only, because it becomes the root of their shards.
    """

    def __init__(self, stages: Mapping[int, Decoder], pipeline: Axis, layout: UpdateLayout, device: torch.device):
        """Take the decoders of this rank's stages, by stage number. Collective over the pipeline axis."""
        assert pipeline.size > 1, "a pipeline has at least two ranks"
        assert tuple(sorted(stages)) == stage_numbers(pipeline, layout), (sorted(stages), pipeline.rank, layout)
        self._ranks = stage_ranks(layout)
        for number, decoder in stages.items():
            assert decoder.span == layer_spans(decoder.config.num_layers, len(self._ranks))[number], decoder.span
        self._stages = {number: _numbered_stage(stages[number]) for number in sorted(stages)}
        self._pipeline, self._layout, self._device = pipeline, layout, device
        # NCCL opens a group's connections in its first collective, which all ranks have to join.
        pipeline.sum(torch.zeros(1, device=device))

    def train(
        self, num_microbatches: int, hidden_shape: tuple[int, int], dtype: torch.dtype, compute: Compute
    ) -> list[Tensor]:
        """Add the gradients of the sum of all losses to the weights'.

        Between any two stages, hidden states have this shape [T, D] and dtype for all micro-batches. Returns each
        micro-batch's loss on the rank of the last stage, nothing on the others. Collective over the pipeline axis, and
        over the axes of `compute` and FSDP2: all ranks pass the same numbers.
        """
        numbers = torch.arange(microbatch_count(num_microbatches, self._layout))
        task = StageTask(compute, num_microbatches, _travelling(hidden_shape, dtype))
        losses: list[Tensor] = []
        with self._working_on(task), self._earlier_gradients(), self._kept_whole():
            # A schedule holds buffers for all its micro-batches, so none outlives its step.
            schedule = self._schedule(len(numbers), task.hidden_TD)
            schedule.step(microbatch=numbers, target=numbers, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses[:num_microbatches]]

    @torch.no_grad()
    def evaluate(
        self, num_microbatches: int, hidden_shape: tuple[int, int], dtype: torch.dtype, compute: Compute
    ) -> list[Tensor]:
        """Run forward only; returns the last stage's outputs by micro-batch on its rank, nothing on the others.

        Collective, with hidden states as in `train`.
        """
        task = StageTask(compute, num_microbatches, _travelling(hidden_shape, dtype))
        traffic = _ForwardTraffic(self._pipeline, self._ranks, task.hidden_TD, self._device)
        last = len(self._ranks) - 1
        outputs = []
        with self._working_on(task):
            for number, microbatch in forward_order(self._ranks, num_microbatches):
                if self._ranks[number] == self._pipeline.rank:
                    inputs = traffic.take(number, microbatch)
                    output = self._stages[number](*inputs, microbatch=torch.tensor(microbatch))
                    if number == last:
                        outputs.append(output)
                    else:
                        traffic.send(number, microbatch, output)
                elif number < last and self._ranks[number + 1] == self._pipeline.rank:
                    traffic.expect(number, microbatch)
            traffic.finish()
        return outputs

    def _schedule(self, count: int, hidden_TD: Tensor) -> Any:
        num_stages = len(self._ranks)
        loss = torch.empty((), device="meta", requires_grad=True)
        stages: list[Any] = [
            PipelineStage(
                stage,
                number,
                num_stages,
                self._device,
                # Shapes given in advance save a forward pass that would find them out.
                input_args=(hidden_TD,) if number else (),
                output_args=(hidden_TD if number + 1 < num_stages else loss,),
                group=self._pipeline.group,
            )
            for number, stage in self._stages.items()
        ]
        name = self._layout.pipeline_schedule
        if name in _OF_ONE_STAGE:
            return _OF_ONE_STAGE[name](stages[0], count, _already_a_loss, scale_grads=False)
        return _OF_SEVERAL_STAGES[name](stages, count, _already_a_loss, scale_grads=False)

    @contextmanager
    def _working_on(self, task: StageTask) -> Iterator[None]:
        for stage in self._stages.values():
            stage.task = task
        yield
        # It may keep whole batches alive.
        for stage in self._stages.values():
            stage.task = None

    @contextmanager
    def _earlier_gradients(self) -> Iterator[None]:
        """Hide gradients from the schedule and add them afterwards: some start by dropping those of shards."""
        weights = [weight for stage in self._stages.values() for weight in stage.parameters()]
        earlier = [(weight, weight.grad) for weight in weights if weight.grad is not None]
        for weight, _ in earlier:
            weight.grad = None
        yield
        for weight, gradient in earlier:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    @contextmanager
    def _kept_whole(self) -> Iterator[None]:
        """Let schedules of several stages decide when weights are resharded.

        They gather a stage's weights ahead of its turn. Zero-bubble ones also use the gathered weights between the
        backward passes for inputs and for weights.
        """
        sharded = [stage for stage in self._stages.values() if isinstance(stage, FSDPModule)]
        if self._layout.pipeline_schedule in _OF_ONE_STAGE:
            sharded = []
        for stage in sharded:
            stage.set_reshard_after_forward(False)
        yield
        for stage in sharded:
            stage.set_reshard_after_forward(True)


def _numbered_stage(decoder: Decoder) -> NumberedStage:
    """Return a stage around a decoder, sharded if the decoder is: schedules look at the outermost module only."""
    stage = NumberedStage(decoder)
    if isinstance(decoder, FSDPModule):
        sharded = next(weight for weight in decoder.parameters() if isinstance(weight, DTensor))
        plain = {weight for weight in decoder.parameters() if not isinstance(weight, DTensor)}
        fully_shard(stage, mesh=sharded.device_mesh, ignored_params=plain or None)
    return stage


def _travelling(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a template of the hidden states between stages, without storage."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def _already_a_loss(output: Tensor, target: Tensor) -> Tensor:
    return output


class _ForwardTraffic:
    """Hidden states in transfer between stages, in the one order that all ranks follow."""

    def __init__(self, pipeline: Axis, ranks: tuple[int, ...], hidden_TD: Tensor, device: torch.device):
        self._pipeline, self._ranks, self._hidden_TD, self._device = pipeline, ranks, hidden_TD, device
        self._arriving: dict[tuple[int, int], tuple[dist.Work | None, Tensor]] = {}
        self._leaving: tuple[dist.Work | None, Tensor] | None = None

    def expect(self, number: int, microbatch: int) -> None:
        """Start receiving the output of another rank's stage for the next stage, which is on this rank."""
        buffer_TD = torch.empty_like(self._hidden_TD, device=self._device, requires_grad=False)
        source = self._pipeline.ranks[self._ranks[number]]
        self._arriving[number + 1, microbatch] = dist.irecv(buffer_TD, source, self._pipeline.group), buffer_TD

    def take(self, number: int, microbatch: int) -> tuple[Tensor, ...]:
        """Wait for a stage's inputs and return them; none for the first."""
        if number == 0:
            return ()
        work, hidden_TD = self._arriving.pop((number, microbatch))
        if work is not None:
            work.wait()
        return (hidden_TD,)

    def send(self, number: int, microbatch: int, hidden_TD: Tensor) -> None:
        """Start sending a stage's output to the next stage, which may also be on this rank."""
        place = self._ranks[number + 1]
        if place == self._pipeline.rank:
            self._arriving[number + 1, microbatch] = None, hidden_TD
            return
        self.finish()
        hidden_TD = hidden_TD.contiguous()
        work = dist.isend(hidden_TD, self._pipeline.ranks[place], self._pipeline.group)
        self._leaving = work, hidden_TD

    def finish(self) -> None:
        """Wait for the last sends, whose storage must live until then."""
        if self._leaving is not None and self._leaving[0] is not None:
            self._leaving[0].wait()
        self._leaving = None


def sum_tied_gradients(copies: Sequence[Tensor], pipeline: Axis) -> None:
    """Replace, in place, the gradients of the copies of a tied head's weight by their sum.

    `copies` are this rank's stored parts: the embedding's on the first stage's rank, the head's on the last stage's,
    cut equally; both if they are one rank, none elsewhere. Collective over the ranks that hold one.
    """
    if len(copies) == 2:
        copies[0].add_(copies[1])
        copies[1].copy_(copies[0])
        return
    for own in copies:
        peer = pipeline.ranks[-1 if pipeline.rank == 0 else 0]
        sent, received = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        operations = [(dist.isend, sent), (dist.irecv, received)]
        for work in dist.batch_isend_irecv([dist.P2POp(op, held, peer, pipeline.group) for op, held in operations]):
            work.wait()
        own.add_(received)
