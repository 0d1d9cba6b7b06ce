"""Settings of the two flows: the dock and resharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt


@dataclass(frozen=True)
class DockConfig:
    """Placement of rows in the transfer dock, and its waits."""

    # Parts of a step's responses that models score one after another where rows wait for an environment: of each
    # replica shares of its rows in the order in which they ended, the later ones smaller; where replicas keep responses
    # for a later step, its groups in the order in which they are whole.
    portions: ClassVar[int] = 16

    timeout_seconds: Annotated[float, Gt(0)] = 120.0
    """longest that one request to a warehouse may take before the job ends with an error"""
    locality: bool = True
    """whether rows stay on the node that generates them and are assigned within it first; false: the paper's
    placement"""
    balance: Literal["cost", "rows"] = "cost"
    """what ranks get equal shares of; cost: the model's work for rows, and for groups that are to be generated what is
    expected of their prompts' earlier responses; rows: their numbers, for comparison"""
    fuse: bool = True
    """whether rewards are waited for behind all that models score, and portions are scored while other rows wait for
    the environment, where all weights fit beside generation; false: one state after the other, to the same bits"""
    network: Literal["auto", "tcp"] = "auto"
    """how nodes exchange requests on a trusted network; auto: by whatever TensorPipe finds best; tcp: by plain TCP"""


Executor = Literal["allgather", "exact"]
SwapMode = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class ReshardConfig:
    """Movement of weights from the update layout to the generation layout."""

    bucket_bytes: Annotated[int, Ge(1)] = 64 << 20
    """temporary device memory for resharding; weights move through it bucket by bucket"""
    executor: Executor = "exact"
    """exact: move only the slices that a rank lacks; allgather: the paper's all-gather and select"""
    verify: bool = False
    """whether to compare checksums of generation and update weights at each switch; costs a pass over the weights"""
    probe_tokens: int = 32
    """prompt tokens whose log-probs trainer and generator both compute at each switch, before generation; 0: none"""
    probe_tolerance: Annotated[float, Ge(0)] | None = None
    """largest difference of these log-probs, in nats, that doesn't end the run; null: 0.01 in float32, 1 in 16 bits. In
    16 bits a quarter of the tokens may be beyond it in models with experts"""
    swap: SwapMode = "auto"
    """whether the training state leaves the device while responses are generated; auto: only where both don't fit"""
    swap_dir: str | None = None
    """folder of the file that takes the training state on a CPU, best on a fast disk; null: the run's folder"""

    def __post_init__(self) -> None:
        if self.probe_tokens < 0 or self.probe_tokens == 1:
            raise ValueError(
                f"reshard.probe_tokens is {self.probe_tokens}, but must be >= 2, as the first token of a row isn't "
                "rated, or 0 for no probe"
            )
