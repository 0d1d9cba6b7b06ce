"""Settings of the two flows: the dock and resharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt


@dataclass(frozen=True)
class DockConfig:
    """Placement of rows in the transfer dock, and its waits."""

    # Parts of a step's responses that models score one after another while rows wait for an environment: shares of each
    # replica's rows in the order in which they ended, the later ones smaller; where responses may take several steps,
    # groups in the order in which they complete.
    portions: ClassVar[int] = 16

    timeout_seconds: Annotated[float, Gt(0)] = 120.0
    """time limit of one request to a warehouse, after which the job ends with an error"""
    locality: bool = True
    """keep rows on the node that generates them, and assign them within it first; false: the paper's placement"""
    balance: Literal["cost", "rows"] = "cost"
    """quantity that ranks get equal shares of; cost: the model's work for rows, for groups to be generated an estimate
    from their prompts' earlier responses; rows: numbers of rows, for comparison"""
    fuse: bool = True
    """overlap reward functions and environments with model scoring, where all weights fit beside generation; results
    are bit-identical either way"""
    network: Literal["auto", "tcp"] = "auto"
    """transport of requests between nodes on a trusted network; auto: TensorPipe's choice; tcp: plain TCP"""


Executor = Literal["allgather", "exact"]
SwapMode = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class ReshardConfig:
    """Movement of weights from the update layout to the generation layout."""

    bucket_bytes: Annotated[int, Ge(1)] = 64 << 20
    """temporary device memory for resharding; weights move through it bucket by bucket"""
    executor: Executor = "exact"
    """algorithm of resharding; exact: move only the slices that a rank lacks; allgather: the paper's all-gather and
    select"""
    verify: bool = False
    """compare checksums of generation and update weights at each switch; costs a pass over the weights"""
    probe_tokens: int = 32
    """number of prompt tokens whose log-probs trainer and generator both compute at each switch, as a check; 0: none"""
    probe_tolerance: Annotated[float, Ge(0)] | None = None
    """largest allowed difference of these log-probs, in nats; beyond it the run ends; null: 0.01 in float32, 1 in 16
    bits, where a quarter of the tokens may exceed it in models with experts"""
    swap: SwapMode = "auto"
    """swapping of the training state out of the device during generation; auto: only if both don't fit"""
    swap_dir: str | None = None
    """folder of the swap file on a CPU, best on a fast disk; null: the run's folder"""

    def __post_init__(self) -> None:
        if self.probe_tokens < 0 or self.probe_tokens == 1:
            raise ValueError(
                f"reshard.probe_tokens is {self.probe_tokens}, but must be >= 2, as the first token of a row isn't "
                "rated, or 0 for no probe"
            )
