"""A pipeline stage as PyTorch's schedules run it: a span of the decoder that gets the number of each micro-batch.

Shape letters: `T` tokens of a micro-batch that this rank holds between blocks; `D` model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spmdrl.engines.models.decoder import Decoder

Compute = Callable[[Decoder, Tensor | None, int], Tensor]
"""(stage, its inputs, micro-batch) -> the stage's output [T, D]. The first stage's inputs are None: its tokens are
looked up. The last stage's output is a float32 scalar loss, or whatever tensor an evaluation wants."""


@dataclass(frozen=True)
class StageTask:
    """What to do with micro-batches; those from `num_microbatches` on are idle."""

    compute: Compute
    num_microbatches: int
    hidden_TD: Tensor
    """What goes from stage to stage, without its storage."""


class NumberedStage(nn.Module):
    """A stage that gets the number of the micro-batch it runs, in the form that schedules can pass on."""

    task: StageTask | None

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder
        self.task = None

    def __call__(self, *inputs: Tensor, microbatch: Tensor) -> Tensor:
        # Read before FSDP's hooks move it to the device, where reading it would wait for all work before it.
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
        """A micro-batch of zeros that goes through without any work and ends in a loss of zero."""
        if hidden_TD is None:
            return torch.zeros_like(meta_TD, device=next(self.parameters()).device, requires_grad=True)
        return (hidden_TD * 0).sum(dtype=torch.float32) if self.decoder.span.heads else hidden_TD.clone()
