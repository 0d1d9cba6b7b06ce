"""How long a model is trained, and how a batch is cut up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from spmdrl.engines.training.batching.microbatch import (
    DEFAULT_TOKENS_PER_MICROBATCH,
    DEFAULT_TOKENS_PER_MICROBATCH_ON_CPU,
)
from spmdrl.engines.training.routing.routers import RoutingConfig
from spmdrl.resources.device import Device

Recompute = Literal["none", "full"]


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and how a batch is cut up."""

    max_steps: Annotated[int, Ge(1)] = 100
    """steps of the whole run; each takes new prompts"""
    updates_per_step: Annotated[int, Ge(1)] = 1
    """optimizer steps that a step's samples are split into"""
    epochs_per_step: Annotated[int, Ge(1)] = 1
    """times that each sample of a step is trained on"""
    skip_zero_advantage: bool = True
    """leave out rows of advantage 0 where they have no gradient; entropy and mismatch are then measured on the
    others"""
    activation_checkpointing: Recompute = "none"
    """full: keep only each layer's input for the backward pass and run the layer again; saves memory, costs a third
    more work"""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """routing of tokens to experts, in models that have them"""
    max_tokens_per_microbatch: Annotated[int, Ge(1)] | None = None
    """tokens that go through the model at once, prompts included; a longer row runs alone; null: 16384, on CPU 2048"""
    max_skipped_in_a_row: Annotated[int, Ge(1)] | None = 10
    """skipped updates in a row, as loss or gradient isn't finite, after which the run ends; null: none are too many"""
    share_prompts: bool = True
    """rows of a micro-batch with the same prompt compute it once, in the update and where rows are scored, unless a
    response is more than four times as long; equal responses too, and in dense models no token behind which nothing is
    rated; gradients, and log-probs on accelerators, differ by rounding; of no effect on a context axis of kind ring"""

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.max_steps * self.updates_per_step * self.epochs_per_step

    def tokens_per_microbatch(self, device: Device) -> int:
        """The budget of one micro-batch on this kind of device."""
        default = DEFAULT_TOKENS_PER_MICROBATCH_ON_CPU if device.is_cpu else DEFAULT_TOKENS_PER_MICROBATCH
        return self.max_tokens_per_microbatch or default
