"""Update and generation layouts: number of ranks per axis of parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from annotated_types import Interval

from spmdrl.nouns.settings.layout_config import FACTORS
from spmdrl.nouns.settings.layout_config import ContextKind as ContextKind
from spmdrl.nouns.settings.layout_config import GenerationLayout as GenerationLayout
from spmdrl.nouns.settings.layout_config import RankSetsConfig as RankSetsConfig
from spmdrl.nouns.settings.layout_config import UpdateLayout as UpdateLayout

# A year: longer ones overflow the clocks of some communication libraries.
_LONGEST_TIMEOUT_SECONDS = 365 * 86400.0


@dataclass(frozen=True)
class ResourcesConfig:
    """Resources of the job."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """kind of device; auto: the accelerator that PyTorch finds, else cpu"""
    update: UpdateLayout = field(default_factory=UpdateLayout)
    """layout of the update shards"""
    generation: GenerationLayout = field(default_factory=GenerationLayout)
    """layout of the generation shards"""
    ranks: RankSetsConfig = field(default_factory=RankSetsConfig)
    """ranks that only generate"""
    timeout_seconds: Annotated[float, Interval(gt=0, le=_LONGEST_TIMEOUT_SECONDS)] = 1800.0
    """time limit of a collective's wait for its slowest rank, after which the job stops"""
    start_timeout_seconds: Annotated[float, Interval(gt=0, le=_LONGEST_TIMEOUT_SECONDS)] = 300.0
    """time limit of a rank's wait for the others at the start; then the job stops and names the missing ones"""
    stage_timeout_seconds: Annotated[float, Interval(ge=0, le=_LONGEST_TIMEOUT_SECONDS)] | None = None
    """longest time of a rank without progress: no engine step, micro-batch, optimizer step, answer of a reward or
    environment, file. Then the job ends with the rank that holds it up and the stacks of all; start-up, the first step
    and checkpoints may take three times as long; null: 600, or twice the longest timeout of rewards and the
    environment; 0: no limit"""
    trusted_network: bool = False
    """connect ranks without proof that they belong to the job, on public addresses too; only for networks whose
    firewall keeps everyone else out: anyone who reaches a port can run code in the job"""


def fit_update_layout(layout: UpdateLayout, world_size: int, key: str = "resources.update") -> UpdateLayout:
    """Fill in an open degree, and check that the degrees take exactly all ranks.

    `key` is the layout's place in the config. Raises ValueError with the numbers, the relation and a way out.
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
        product = " x ".join(f"{name} {getattr(layout, name)}" for name in FACTORS if getattr(layout, name) != 1)
        raise ValueError(
            f"update layout needs {product or 'shard 1'} = {layout.num_ranks} ranks, but the job has {world_size}; "
            f"start {layout.num_ranks} ranks, or set {key}.shard or {key}.data to 0 (all that are left)"
        )
    _check_expert(layout, key)
    return layout


def _filled(layout: UpdateLayout, degree: str, world_size: int, key: str) -> UpdateLayout:
    """Return the layout with the open degree set to the remaining ranks."""
    others = _with_degree(layout, degree, 1).num_ranks
    if world_size % others == 0:
        return _with_degree(layout, degree, world_size // others)
    used = [name for name in FACTORS if name != degree and getattr(layout, name) > 1]
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
    """Check that generation degrees, configured under `key`, fit each other and the job.

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
