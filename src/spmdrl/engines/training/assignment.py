"""Decides who runs which layers of a pipelined decoder, and in what order: numbers only, no tensors.

A *stage* is a run of layers; each rank of the pipeline axis holds `pipeline_chunks` of them. In a loop, rank r of P
holds stages r, r + P, ...; in a V (zbv), stages r and 2P - 1 - r, so that the first rank also ends the pipeline.
"""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

from spmdrl.engines.models.decoder import DecoderConfig, LayerSpan
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import Axis

_ONE_CHUNK = ("gpipe", "1f1b")
_SPLIT_BACKWARD = ("zero_bubble", "zbv")
"""Schedules that go back to inputs first and to weights later."""
_SPLITS_RIGHT = "2.12"
"""Before this PyTorch, the weights of functions with several outputs, as the head is, get wrong gradients there."""


def check_pipeline(
    config: DecoderConfig,
    layout: UpdateLayout,
    key: str = "resources.update",
    *,
    torch_version: TorchVersion = torch.__version__,
) -> None:
    """Raise ValueError where a model can't be pipelined this way; decided by each rank alone.

    `key` is where the config has the layout.
    """
    chunks, schedule = layout.pipeline_chunks, layout.pipeline_schedule
    if layout.pipeline == 1:
        if chunks > 1:
            raise ValueError(
                f"{key}.pipeline_chunks is {chunks}, but {key}.pipeline is 1, and one rank needs "
                "no chunks; set pipeline_chunks to 1, or pipeline to 2 or more"
            )
        return
    if schedule in _SPLIT_BACKWARD and torch_version < _SPLITS_RIGHT:
        raise ValueError(
            f"{key}.pipeline_schedule is {schedule}, but PyTorch {torch_version} computes wrong gradients "
            f"with it; set it to interleaved or 1f1b, or install PyTorch {_SPLITS_RIGHT} or newer"
        )
    complaint, way_out = _chunk_complaint(layout)
    if complaint:
        raise ValueError(
            f"{key}.pipeline_schedule is {schedule}, which {complaint}, but "
            f"{key}.pipeline_chunks is {chunks}; {way_out}"
        )
    stages = layout.pipeline * chunks
    if config.num_layers < stages:
        raise ValueError(
            f"{key}.pipeline {layout.pipeline} x pipeline_chunks {chunks} = {stages} stages need at least a "
            f"layer each, but the model has {config.num_layers}; lower pipeline or pipeline_chunks"
        )


def _chunk_complaint(layout: UpdateLayout) -> tuple[str, str]:
    """What a schedule has against the number of chunks, and the way out; empty where nothing."""
    chunks, schedule = layout.pipeline_chunks, layout.pipeline_schedule
    if schedule in _ONE_CHUNK and chunks != 1:
        return "holds one chunk of layers per rank", "set it to 1, or pipeline_schedule to interleaved or zero_bubble"
    if schedule == "interleaved" and chunks < 2:
        return "interleaves several chunks of layers per rank", "set it to 2 or more, or pipeline_schedule to 1f1b"
    if schedule == "zbv" and chunks != 2:
        return "holds exactly 2 chunks of layers per rank", "set it to 2, or pipeline_schedule to zero_bubble"
    return "", ""


def layer_spans(num_layers: int, num_stages: int) -> list[LayerSpan]:
    """The layers of each stage: equally many, or one more in the earlier ones, because the last has the head to run."""
    assert 1 <= num_stages <= num_layers, (num_stages, num_layers)
    least, extra = divmod(num_layers, num_stages)
    bounds = [stage * least + min(stage, extra) for stage in range(num_stages + 1)]
    return [
        LayerSpan(first, stop, embeds=first == 0, heads=stop == num_layers)
        for first, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def stage_ranks(layout: UpdateLayout) -> tuple[int, ...]:
    """The place on the pipeline axis that runs each stage."""
    places = tuple(range(layout.pipeline))
    if layout.pipeline_schedule == "zbv":
        return places + places[::-1]
    return places * layout.pipeline_chunks


def stage_numbers(pipeline: Axis, layout: UpdateLayout) -> tuple[int, ...]:
    """The stages that this rank runs, in rising order."""
    return tuple(stage for stage, place in enumerate(stage_ranks(layout)) if place == pipeline.rank)


def microbatch_count(num_microbatches: int, layout: UpdateLayout) -> int:
    """The fewest micro-batches, no fewer than these, that PyTorch's schedules accept; the others have to be idle ones.

    One-chunk schedules want one for each rank at least; those of several chunks go by rounds of equal length.
    """
    assert num_microbatches >= 1, num_microbatches
    if layout.pipeline_schedule in _ONE_CHUNK:
        return max(num_microbatches, layout.pipeline)
    if layout.pipeline_schedule == "zbv":
        return num_microbatches
    # Of n >= P there are n // P rounds; the next multiple of P is always reached.
    count = num_microbatches
    while count % max(1, count // layout.pipeline):
        count += 1
    return count


def forward_order(ranks: tuple[int, ...], num_microbatches: int) -> list[tuple[int, int]]:
    """All (stage, micro-batch) in an order that fills a forward-only pipeline, given the rank of each stage.

    Greedy in ticks of equal length: at each, every rank runs what is ready of its latest stage, so that results leave
    before more begins. If every rank works, sends and receives in this one order, none can wait in a circle.
    """
    done = [0] * len(ranks)
    order: list[tuple[int, int]] = []
    while done[-1] < num_microbatches:
        ready = (s for s in range(len(ranks)) if done[s] < (done[s - 1] if s else num_microbatches))
        latest = {ranks[stage]: stage for stage in ready}
        for stage in sorted(latest.values()):
            order.append((stage, done[stage]))
        for stage in latest.values():
            done[stage] += 1
    return order
