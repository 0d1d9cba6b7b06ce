"""Settings of layouts: numbers of ranks on each axis of parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

ContextKind = Literal["ring", "ulysses"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]

# Degrees whose product is the number of ranks; `expert` is carved out of data x shard x context.
FACTORS = ("pipeline", "data", "shard", "context", "tensor")


@dataclass(frozen=True)
class UpdateLayout:
    """Degrees of the update shards: pipeline x data x shard x context x tensor ranks, outermost first."""

    data: int = 1
    """replicas of the sharded model; gradients are summed over them; 0: all remaining ranks, for `shard` above 0"""
    shard: int = 0
    """ranks over which FSDP2 (ZeRO-3) spreads weights, gradients and optimizer state; 0: all remaining ranks"""
    pipeline: int = 1
    """ranks over which the layers are split"""
    context: int = 1
    """ranks that share the tokens of each row"""
    tensor: int = 1
    """ranks that share each matrix; between blocks they share the tokens (sequence parallel)"""
    expert: int = 1
    """ranks that share the experts, taken from data x shard x context"""
    context_kind: ContextKind = "ring"
    """kind of context parallelism; ring: pass keys and values around; ulysses: exchange tokens for heads"""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """order of forward and backward passes; interleaved, zero_bubble and zbv hold several chunks of layers per rank"""
    pipeline_chunks: int = 1
    """chunks of layers per pipeline rank (VPP)"""

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data * self.shard * self.context * self.tensor

    @property
    def expert_shard(self) -> int:
        """Ranks over which FSDP2 spreads one expert's weights, within one replica where the experts leave room."""
        return max(1, self.shard * self.context // self.expert)

    def __str__(self) -> str:
        """Return the axes that are in use, such as `shard 2 x tensor 2`."""
        names = (*FACTORS, "expert")
        parts = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) != 1]
        if self.context > 1:
            parts.append(self.context_kind)
        if self.pipeline > 1:
            parts.append(self.pipeline_schedule + (f" {self.pipeline_chunks}" if self.pipeline_chunks > 1 else ""))
        return " x ".join(parts) or "1"


@dataclass(frozen=True)
class GenerationLayout:
    """Degrees of the generation shards; replicas on the remaining ranks generate side by side."""

    tensor: int = 1
    """ranks that share each matrix, and with it one generation engine"""
    expert: int = 1
    """ranks that share the experts, each holding whole ones; 1: experts are cut like other matrices"""
    tensor_stride: int = 0
    """distance between the ranks that share a matrix; 0: the distance that keeps most slices in place"""

    def place(self, rank: int) -> tuple[int, int]:
        """Return the replica that a rank belongs to, and its place among the ranks that share each matrix."""
        stride = self.tensor_stride or 1
        outer, inner = divmod(rank, stride * self.tensor)
        place, beside = divmod(inner, stride)
        return outer * stride + beside, place

    def expert_place(self, rank: int) -> int:
        """Return a rank's place among those that share the experts."""
        replica, place = self.place(rank)
        return replica * self.tensor % self.expert + place if self.expert > 1 else 0

    def __str__(self) -> str:
        """Return the degrees that are in use, such as `tensor 2 x expert 4`."""
        parts = [f"{name} {getattr(self, name)}" for name in ("tensor", "expert") if getattr(self, name) != 1]
        return " x ".join(parts) or "1"


@dataclass(frozen=True)
class RankSetsConfig:
    """Sets of ranks that do one part of a step's work each."""

    generation: Annotated[int, Ge(0)] = 0
    """number of ranks, the last of the job, that only generate and reward, while the others only train; 0: every rank
    does both"""

    def split(self, num_ranks: int) -> tuple[range, range]:
        """Return the ranks that train and those that generate. Raises ValueError if none would train."""
        if self.generation == 0:
            return range(num_ranks), range(num_ranks)
        if self.generation >= num_ranks:
            raise ValueError(
                f"resources.ranks.generation is {self.generation}, but the job has {num_ranks} "
                f"rank{'s'[: num_ranks > 1]}, and one at least must train; lower it, or start more ranks"
            )
        first = num_ranks - self.generation
        return range(first), range(first, num_ranks)
