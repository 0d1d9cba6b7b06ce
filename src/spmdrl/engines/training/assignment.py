"""Assignment of a pipelined decoder's layers to ranks, and their order: numbers only, no tensors.

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
"""Schedules that compute gradients of inputs first and of weights later."""
_SPLITS_RIGHT = "2.12"
"""Before this PyTorch, these schedules compute wrong gradients for functions with several outputs, such as the head."""


def check_pipeline(
    config: DecoderConfig,
    layout: UpdateLayout,
    key: str = "resources.update",
    *,
    torch_version: TorchVersion = torch.__version__,
) -> None:
    """Raise ValueError if a model can't be pipelined this way; needs no communication.

    `key` is the layout's place in the config.
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
    """Return a schedule's rule for the number of chunks, if broken, and the way out; else empty texts."""
    chunks, schedule = layout.pipeline_chunks, layout.pipeline_schedule
    if schedule in _ONE_CHUNK and chunks != 1:
        return "holds one chunk of layers per rank", "set it to 1, or pipeline_schedule to interleaved or zero_bubble"
    if schedule == "interleaved" and chunks < 2:
        return "interleaves several chunks of layers per rank", "set it to 2 or more, or pipeline_schedule to 1f1b"
    if schedule == "zbv" and chunks != 2:
        return "holds exactly 2 chunks of layers per rank", "set it to 2, or pipeline_schedule to zero_bubble"
    return "", ""


def layer_spans(num_layers: int, num_stages: int) -> list[LayerSpan]:
    """Return each stage's layers: equally many, or one more in earlier stages, because the last also runs the head."""
    assert 1 <= num_stages <= num_layers, (num_stages, num_layers)
    least, extra = divmod(num_layers, num_stages)
    bounds = [stage * least + min(stage, extra) for stage in range(num_stages + 1)]
    return [
        LayerSpan(first, stop, embeds=first == 0, heads=stop == num_layers)
        for first, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def stage_ranks(layout: UpdateLayout) -> tuple[int, ...]:
    """Return each stage's place on the pipeline axis."""
    places = tuple(range(layout.pipeline))
    if layout.pipeline_schedule == "zbv":
        return places + places[::-1]
    return places * layout.pipeline_chunks


def stage_numbers(pipeline: Axis, layout: UpdateLayout) -> tuple[int, ...]:
    """Return the stages that this rank runs, in rising order."""
    return tuple(stage for stage, place in enumerate(stage_ranks(layout)) if place == pipeline.rank)


def microbatch_count(num_microbatches: int, layout: UpdateLayout) -> int:
    """Round up to the next number of micro-batches that PyTorch's schedules accept; the added ones are idle.

    One-chunk schedules need at least one per rank; schedules of several chunks go by rounds of equal length.
    """
    assert num_microbatches >= 1, num_microbatches
    if layout.pipeline_schedule in _ONE_CHUNK:
        return max(num_microbatches, layout.pipeline)
    if layout.pipeline_schedule == "zbv":
        return num_microbatches
    # For n >= P there are n // P rounds; the next multiple of P is always reached.
    count = num_microbatches
    while count % max(1, count // layout.pipeline):
        count += 1
    return count


def forward_order(ranks: tuple[int, ...], num_microbatches: int) -> list[tuple[int, int]]:
    """Return all (stage, micro-batch) in an order that fills a forward-only pipeline, given the rank of each stage.

    Greedy in ticks of equal length: at each, every rank runs the ready work of its latest stage, so that results leave
    before more begins. If every rank works, sends and receives in this one order, there can be no deadlock.
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
