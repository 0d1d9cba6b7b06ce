"""One exchange of slices and the generator's dtypes, from which all ranks derive the same plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spmdrl.dataflow.resharding.planning.plan import ReshardPlan, Shapes, plan_resharding
from spmdrl.nouns.batch import WeightSlice
from spmdrl.nouns.settings.flow_config import Executor
from spmdrl.resources.collectives import gather_bytes, max_over


@dataclass(frozen=True)
class AgreedPlan:
    """The plan, with values that must be equal on all ranks."""

    plan: ReshardPlan
    shapes: Shapes
    dtypes: Mapping[str, torch.dtype]
    """the generator's dtypes by weight, also used on the wire"""


def agree_on_plan(
    held: Sequence[WeightSlice],
    wanted: Mapping[WeightSlice, torch.dtype],
    shapes: Shapes,
    bucket_bytes: int,
    *,
    ranks_per_node: int,
    executor: Executor,
) -> AgreedPlan:
    """Plan from the slices that all ranks hold and want. Collective over the world.

    Raises ValueError when ranks want one weight in different dtypes.
    """
    mine = {"held": list(map(_listed, held)), "wanted": [[*_listed(box), str(t)] for box, t in wanted.items()]}
    ranks = [json.loads(payload) for payload in gather_bytes(json.dumps(mine).encode())]
    source = {rank: [_slice(*box) for box in part["held"]] for rank, part in enumerate(ranks)}
    target = {rank: [_slice(*box[:3]) for box in part["wanted"]] for rank, part in enumerate(ranks)}
    dtypes: dict[str, torch.dtype] = {}
    for rank, part in enumerate(ranks):
        for name, _, _, text in part["wanted"]:
            dtype = getattr(torch, text.removeprefix("torch."))
            assert isinstance(dtype, torch.dtype), text
            if dtypes.setdefault(name, dtype) != dtype:
                raise ValueError(f"rank {rank} wants {name} as {dtype}, another as {dtypes[name]}; use one dtype")
    element_bytes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    plan = plan_resharding(
        source, target, shapes, bucket_bytes, element_bytes, ranks_per_node=ranks_per_node,
        gathers=executor == "allgather",
    )  # fmt: skip
    return AgreedPlan(plan, shapes, dtypes)


def agree_on_shapes(held: Shapes) -> dict[str, tuple[int, ...]]:
    """Return shapes of the whole weights that any rank holds a part of, in one order. Collective over the world."""
    shapes: dict[str, tuple[int, ...]] = {}
    for payload in gather_bytes(json.dumps(dict(held)).encode()):
        for name, shape in json.loads(payload).items():
            shapes.setdefault(name, tuple(shape))
    return shapes


def check_same_version(update_count: int) -> None:
    """Raise RuntimeError unless all ranks have done as many updates. Collective over the world."""
    most, minus_least = max_over(torch.tensor([update_count, -update_count])).tolist()
    if most != -minus_least:
        raise RuntimeError(
            f"this rank's weights are {update_count} updates old, but ranks range from {-minus_least} to {most}; "
            "a rank skipped an update or loaded another checkpoint"
        )


def refuse_together(what: str, faults: Sequence[str]) -> None:
    """Raise RuntimeError on every rank if any found faults. Collective over the world."""
    worst = int(max_over(torch.tensor([len(faults)])))
    if worst:
        here = "; ".join(faults[:3]) or "none on this rank"
        raise RuntimeError(
            f"{what}: {worst} faults on the worst rank ({len(faults)} here: {here}); nothing was generated with these "
            "weights, restart from the last checkpoint"
        )


def _listed(box: WeightSlice) -> list[object]:
    return [box.name, box.starts, box.stops]


def _slice(name: str, starts: list[int], stops: list[int]) -> WeightSlice:
    return WeightSlice(name, tuple(starts), tuple(stops))
