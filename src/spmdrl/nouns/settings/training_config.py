"""Settings of updates: steps, micro-batches, the optimizer and the routing to experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Gt, Interval

NotNegative: TypeAlias = Annotated[float, Interval(ge=0, lt=math.inf)]
Decay: TypeAlias = Annotated[float, Interval(ge=0, lt=1)]


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, by default AdamW (arXiv:1711.05101, algorithm 2)."""

    name: Literal["adamw", "muon"] = "adamw"
    """optimizer; muon: matrices of layers and experts change by their gradient's moving average, orthogonalized and of
    the size of AdamW's steps (arXiv:2502.16982), and all other weights by AdamW"""
    lr: Annotated[float, Interval(ge=0, le=10)] = 1e-6
    """peak learning rate"""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """largest global norm of the gradients; larger gradients are scaled down to it; .inf: no clipping"""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """decay rates of AdamW's moving averages of the gradient and its square"""
    eps: NotNegative = 1e-8
    """value added to the root of the mean squared gradient"""
    weight_decay: NotNegative = 0.0
    """decoupled weight decay of all parameters per optimizer step, times the learning rate"""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """optimizer steps over which the learning rate rises linearly to its peak"""
    warmup_ratio: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """the same as a share of all optimizer steps, rounded up, in place of warmup_steps"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning rate after the warm-up; constant: unchanged; linear, cosine: falls to 0 at the last step"""

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and warmup_ratio {self.warmup_ratio:g}, but both set the length "
                "of the warm-up; set one of them to 0"
            )


DEFAULT_TOKENS_PER_MICROBATCH = 16384
# On CPUs activations should fit caches, and blocks that the allocator keeps, as clearing fresh pages is slow. With
# 16384 an update took twice as long, with 4096 a tenth more.
DEFAULT_TOKENS_PER_MICROBATCH_ON_CPU = 2048


@dataclass(frozen=True)
class RoutingConfig:
    """Balance of sparse models' experts, and the source of an update's routing."""

    aux_loss_coefficient: Annotated[float, Interval(ge=0, lt=math.inf)] = 0.0
    """weight of the sequence-wise balance loss, averaged over the rows of an update and summed over layers"""
    bias_update_rate: Annotated[float, Interval(ge=0, lt=math.inf)] = 0.0
    """step of each expert's correction bias towards even loads after an update; for models with such biases"""
    replay: Literal["none", "rollout"] = "none"
    """routing of an update's tokens; rollout: to the experts that generated them (arXiv:2510.11370); none: anew"""


Recompute = Literal["none", "full"]
Epochs: TypeAlias = Annotated[float, Interval(gt=0, lt=math.inf)]
DEFAULT_STEPS = 100


@dataclass(frozen=True)
class TrainingConfig:
    """Length of training, and the division of a batch."""

    # Rows of a micro-batch compute a common prompt once, in updates and scoring, unless a response is more than four
    # times as long; also equal responses, and in dense models no token after the last rated one. Gradients, and
    # log-probs on accelerators, differ by rounding from those without sharing.
    share_prompts: ClassVar[bool] = True

    max_steps: Annotated[int, Ge(1)] | None = None
    """number of steps of the whole run; each takes new prompts; null: as epochs says, or 100"""
    epochs: Epochs | None = None
    """number of passes over the rows of data.train, in whole steps, the last one filled up with rows of the next pass;
    max_steps, where it is set too, decides"""
    updates_per_step: Annotated[int, Ge(1)] = 1
    """number of optimizer steps that a step's samples are split over"""
    epochs_per_step: Annotated[int, Ge(1)] = 1
    """number of times that each sample of a step is trained on"""
    skip_zero_advantage: bool = True
    """leave out rows of advantage 0 if they have no gradient; entropy and mismatch are then measured on the others"""
    activation_checkpointing: Recompute = "none"
    """recomputation in the backward pass; full: keep only each layer's input and run the layer again, which saves
    memory at a third more work"""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """routing of tokens to experts, in models that have them"""
    max_tokens_per_microbatch: Annotated[int, Ge(1)] | None = None
    """largest number of tokens in a micro-batch, prompts included; a longer row runs alone; null: 16384, on CPU 2048"""
    max_skipped_in_a_row: Annotated[int, Ge(1)] | None = 10
    """number of consecutive skipped updates (non-finite loss or gradient) after which the run stops; null: never"""

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, if no epochs decide it."""
        return self.max_steps or DEFAULT_STEPS

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_steps * self.updates_per_step * self.epochs_per_step

    def tokens_per_microbatch(self, device_kind: str) -> int:
        """Return the token budget of one micro-batch on this kind of device."""
        default = DEFAULT_TOKENS_PER_MICROBATCH_ON_CPU if device_kind == "cpu" else DEFAULT_TOKENS_PER_MICROBATCH
        return self.max_tokens_per_microbatch or default
