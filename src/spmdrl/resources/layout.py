"""Update and generation layouts: how many ranks each axis of parallelism takes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from annotated_types import Interval

ContextKind = Literal["ring", "ulysses"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]

# A year: longer ones overflow the clocks of some communication libraries.
_LONGEST_TIMEOUT_SECONDS = 365 * 86400.0
# Degrees whose product is the number of ranks; `expert` is carved out of data x shard x context.
_FACTORS = ("pipeline", "data", "shard", "context", "tensor")


@dataclass(frozen=True)
class UpdateLayout:
    """Degrees of the update shards: pipeline x data x shard x context x tensor ranks, outermost first."""

    data: int = 1
    """replicas of the sharded model; gradients are summed over them; 0: all remaining ranks, for `shard` above 0"""
    shard: int = 0
    """ranks over which FSDP2 (ZeRO-3) spreads weights, gradients and optimizer state; 0: all remaining ranks"""
    pipeline: int = 1
    """ranks that the layers are split over"""
    context: int = 1
    """ranks that share the tokens of each row"""
    tensor: int = 1
    """ranks that share each matrix; between blocks they share the tokens (sequence parallel)"""
    expert: int = 1
    """ranks that share the experts, taken from data x shard x context"""
    context_kind: ContextKind = "ring"
    """ring: keys and values are passed around; ulysses: tokens are exchanged for heads"""
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
        """The axes that are in use, such as `shard 2 x tensor 2`."""
        names = (*_FACTORS, "expert")
        parts = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) != 1]
        if self.context > 1:
            parts.append(self.context_kind)
        if self.pipeline > 1:
            parts.append(self.pipeline_schedule + (f" {self.pipeline_chunks}" if self.pipeline_chunks > 1 else ""))
        return " x ".join(parts) or "1"


@dataclass(frozen=True)
class GenerationLayout:
    """Degrees of the generation shards; the ranks that are left generate side by side."""

    tensor: int = 1
    """ranks that share each matrix, and with it one generation engine"""
    expert: int = 1
    """ranks that share the experts, each holding whole ones; 1: experts are cut like other matrices"""
    tensor_stride: int = 0
    """distance between the ranks that share a matrix; 0: the one that leaves most slices where they are"""

    def place(self, rank: int) -> tuple[int, int]:
        """The replica that a rank belongs to, and its place among the ranks that share each matrix."""
        stride = self.tensor_stride or 1
        outer, inner = divmod(rank, stride * self.tensor)
        place, beside = divmod(inner, stride)
        return outer * stride + beside, place

    def expert_place(self, rank: int) -> int:
        """A rank's place among those that share the experts."""
        replica, place = self.place(rank)
        return replica * self.tensor % self.expert + place if self.expert > 1 else 0

    def __str__(self) -> str:
        """The degrees that are in use, such as `tensor 2 x expert 4`."""
        parts = [f"{name} {getattr(self, name)}" for name in ("tensor", "expert") if getattr(self, name) != 1]
        return " x ".join(parts) or "1"


@dataclass(frozen=True)
class RoleLayouts:
    """Layouts of models beside the policy, over the same ranks; null: that of `resources.update`."""

    reference: UpdateLayout | None = None
    """layout of the reference"""
    critic: UpdateLayout | None = None
    """layout of the critic, with its gradients and optimizer"""
    teacher: UpdateLayout | None = None
    """layout of the teacher"""
    reward_model: UpdateLayout | None = None
    """layout of the reward model"""
    judge: GenerationLayout | None = None
    """layout of the judge, which generates; null: whole on each rank"""

    @property
    def given(self) -> dict[str, UpdateLayout | GenerationLayout]:
        """The layouts that are set, by role name."""
        return {item.name: layout for item in fields(self) if (layout := getattr(self, item.name)) is not None}


@dataclass(frozen=True)
class ResourcesConfig:
    """What the job runs on."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """kind of device; auto: the accelerator that PyTorch finds, else cpu"""
    update: UpdateLayout = field(default_factory=UpdateLayout)
    """layout of the update shards"""
    roles: RoleLayouts = field(default_factory=RoleLayouts)
    """layouts of models that aren't cut like the policy"""
    generation: GenerationLayout = field(default_factory=GenerationLayout)
    """layout of the generation shards"""
    timeout_seconds: Annotated[float, Interval(gt=0, le=_LONGEST_TIMEOUT_SECONDS)] = 1800.0
    """how long a collective may wait for its slowest rank before the job stops"""
    start_timeout_seconds: Annotated[float, Interval(gt=0, le=_LONGEST_TIMEOUT_SECONDS)] = 300.0
    """how long a rank waits for the others at the start; the job then stops and names the missing ones"""
    stage_timeout_seconds: Annotated[float, Interval(ge=0, le=_LONGEST_TIMEOUT_SECONDS)] | None = None
    """how long a rank may make no progress: no engine step, micro-batch, optimizer step, answer of a reward or
    environment, file. Then the job ends with the rank that holds it up and the stacks of all; start-up, the first step
    and checkpoints may take three times as long; null: 600, or twice the longest timeout of rewards and the
    environment; 0: for ever"""
    trusted_network: bool = False
    """connect ranks without proof that they belong to the job, on public addresses too; only for networks whose
    firewall keeps everyone else out: anyone who reaches a port can run code in the job"""


def fit_update_layout(layout: UpdateLayout, world_size: int, key: str = "resources.update") -> UpdateLayout:
    """Fill in the degree that was left open, and check that the degrees take exactly all ranks.

    `key` is where the config has the layout. Raises ValueError with the numbers, the relation and a way out.
    """
    _check_degrees(key, layout, may_be_open=("data", "shard"))
    open_degrees = [name for name in ("data", "shard") if getattr(layout, name) == 0]
    if len(open_degrees) == 2:
        raise ValueError(
            f"{key}.data and {key}.shard are both 0, but only one of them can take the remaining ranks; set {key}.data "
            f"to 1 to shard over all of the job's {world_size} ranks, or {key}.shard to 1 to replicate over them"
        )
    for name in open_degrees:
        layout = _filled(layout, name, world_size, key)
    if layout.num_ranks != world_size:
        product = " x ".join(f"{name} {getattr(layout, name)}" for name in _FACTORS if getattr(layout, name) != 1)
        raise ValueError(
            f"update layout needs {product or 'shard 1'} = {layout.num_ranks} ranks, but the job has {world_size}; "
            f"start {layout.num_ranks} ranks, or set {key}.shard or {key}.data to 0 (all that are left)"
        )
    _check_expert(layout, key)
    return layout


def _filled(layout: UpdateLayout, degree: str, world_size: int, key: str) -> UpdateLayout:
    """The layout whose open degree takes what the others leave of the ranks."""
    others = _with_degree(layout, degree, 1).num_ranks
    if world_size % others == 0:
        return _with_degree(layout, degree, world_size // others)
    used = [name for name in _FACTORS if name != degree and getattr(layout, name) > 1]
    if len(used) == 1:
        raise ValueError(
            f"{key}.{used[0]} {others} does not divide the job's {world_size} ranks; "
            f"set it to one of {_divisors(world_size)}"
        )
    product = " x ".join(f"{name} {getattr(layout, name)}" for name in used)
    raise ValueError(
        f"{key}: {product} = {others} does not divide the job's {world_size} ranks; lower one of them so "
        f"that the product is one of {_divisors(world_size)}"
    )


def _with_degree(layout: UpdateLayout, degree: str, number: int) -> UpdateLayout:
    return replace(layout, data=number) if degree == "data" else replace(layout, shard=number)


def _check_expert(layout: UpdateLayout, key: str) -> None:
    inside, whole = layout.shard * layout.context, layout.data * layout.shard * layout.context
    fits = inside % layout.expert == 0 or (layout.expert % inside == 0 and whole % layout.expert == 0)
    if not fits:
        usable = [n for n in _divisors(whole) if inside % n == 0 or n % inside == 0]
        raise ValueError(
            f"{key}.expert {layout.expert} must divide shard {layout.shard} x context {layout.context} = "
            f"{inside}, or be a multiple of it that divides data x shard x context = {whole}; "
            f"set it to one of {usable}"
        )


def check_generation_layout(layout: GenerationLayout, world_size: int, key: str = "resources.generation") -> None:
    """Refuse generation degrees, which the config has under `key`, that don't fit each other or the job.

    Raises ValueError.
    """
    _check_degrees(key, layout, may_be_open=("tensor_stride",))
    if world_size % layout.tensor:
        raise ValueError(
            f"{key}.tensor {layout.tensor} does not divide the job's {world_size} ranks; "
            f"set it to one of {_divisors(world_size)}"
        )
    if layout.expert > 1 and (layout.expert % layout.tensor or world_size % layout.expert):
        usable = [1, *(n for n in _divisors(world_size) if n % layout.tensor == 0 and n > 1)]
        raise ValueError(
            f"{key}.expert {layout.expert} must be a multiple of tensor {layout.tensor} that divides "
            f"the job's {world_size} ranks, or 1; set it to one of {usable}"
        )
    span = layout.tensor_stride * layout.tensor
    if span and world_size % span:
        raise ValueError(
            f"{key}: tensor_stride {layout.tensor_stride} x tensor {layout.tensor} = {span} does not "
            f"divide the job's {world_size} ranks; set tensor_stride to 0 or 1"
        )


def _check_degrees(key: str, layout: UpdateLayout | GenerationLayout, may_be_open: tuple[str, ...] = ()) -> None:
    for item in fields(layout):
        degree = getattr(layout, item.name)
        least = 0 if item.name in may_be_open else 1
        if isinstance(degree, int) and degree < least:
            raise ValueError(f"{key}.{item.name} is {degree}, but a degree counts ranks; set it to 1 or more")


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
