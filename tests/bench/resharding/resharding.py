"""Update shards become whole generation weights: the two executors beside full_tensor(), and the peak of a switch.

A random model's shards fill the storage of one generation engine a rank, on gloo ranks of this machine: `exact` sends
what is missing, `allgather` is the paper's, and `full_tensor` is the usual way, every parameter whole, then copied.
The three take turns. Then the whole switch runs, with optimizer state, and its peak of memory is set beside the larger
of the update and the generation state plus one bucket.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from spmdrl.config.reader import start_up
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from tests.bench.harness.bench_models import qwen3
from tests.bench.harness.bench_ranks import BenchRanks
from tests.bench.harness.bench_table import BenchTable
from tests.bench.resharding.resharding_ranks import (
    EXECUTORS,
    FULL_TENSOR,
    WAYS,
    ReshardFigures,
    ReshardTask,
    measure_resharding,
)

_MIB = 1 << 20
MOST_BYTES_VS_LEAST, MOST_TEMPORARY_VS_BUCKET, MOST_PEAK_VS_LARGER = 1.02, 1.0, 1.1

Found = Mapping[UpdateLayout, Sequence[ReshardFigures]]
"""what each rank measured, by layout"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--intermediate-size", type=int, default=3072)
    parser.add_argument("--num-layers", type=int, default=13)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of generation weights")
    parser.add_argument("--bucket-mib", type=float, default=ReshardConfig.bucket_bytes / _MIB, help="temporary memory")
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine")
    parser.add_argument("--rounds", type=int, default=3, help="how often all ways run in turn, and how many switches")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Measure every layout on ranks of its own. Raises RuntimeError with the traceback of ranks that failed."""
    with start_up():
        model, layouts = model_of(arguments), layouts_of(arguments.ranks)
    bucket_bytes = round(arguments.bucket_mib * _MIB)
    found = {}
    for layout in layouts:
        task = ReshardTask(model, layout, arguments.dtype, bucket_bytes, arguments.rounds)
        found[layout] = BenchRanks(arguments.ranks, start_method="forkserver").call(measure_resharding, task)
    ratios = ratios_of(found, bucket_bytes)
    rows = [row for layout, ranks in found.items() for row in _rows(layout, ranks, bucket_bytes)]
    model = (
        f"vocabulary {arguments.vocab_size}, width {arguments.hidden_size}, {arguments.num_layers} layers, "
        f"generation weights in {arguments.dtype}"
    )
    return BenchTable(
        title=f"bench resharding: {model}, {arguments.ranks} ranks, buckets of {arguments.bucket_mib:g} MiB",
        rows=rows,
        notes=(
            f"seconds are medians over {arguments.rounds} rounds, bytes those of the busiest rank; temporary is how "
            "much resident memory grew at its peak, the back end's own staging included",
            "peak: of a switch, relative to the larger of update and generation state plus one bucket",
            *(f"{name} {ratio:.3f}" for name, ratio in ratios.items()),
        ),
        details={
            "ratios": ratios,
            "measured": [{"layout": str(layout), "ranks": list(map(asdict, ranks))} for layout, ranks in found.items()],
        },
        passed=ratios["exact_bytes_vs_least"] <= MOST_BYTES_VS_LEAST
        and ratios["exact_temporary_vs_bucket"] <= MOST_TEMPORARY_VS_BUCKET
        and ratios["switch_peak_vs_larger_state"] <= MOST_PEAK_VS_LARGER,
    )


def layouts_of(num_ranks: int) -> list[UpdateLayout]:
    """Weights cut along one dim, and where the ranks allow it along two."""
    layouts = [UpdateLayout()] + ([UpdateLayout(tensor=2)] if num_ranks > 2 and num_ranks % 2 == 0 else [])
    return [fit_update_layout(layout, num_ranks) for layout in layouts]


def ratios_of(found: Found, bucket_bytes: int) -> dict[str, float]:
    """What must be small, of the layout where it is largest."""
    by_layout = [_ratios(ranks, bucket_bytes) for ranks in found.values()]
    return {name: max(ratios[name] for ratios in by_layout) for name in by_layout[0]}


def _ratios(ranks: Sequence[ReshardFigures], bucket_bytes: int) -> dict[str, float]:
    seconds = {way: _median_seconds(ranks, way) for way in WAYS}
    least = sum(rank.least_bytes for rank in ranks)
    received = sum(rank.received_bytes["exact"] for rank in ranks)
    return {
        # A rank alone has nothing to receive.
        "exact_bytes_vs_least": received / least if least else 1.0,
        "exact_temporary_vs_bucket": max(rank.buffer_bytes["exact"] for rank in ranks) / bucket_bytes,
        "exact_temporary_resident_vs_bucket": max(max(rank.temporary_bytes["exact"]) for rank in ranks) / bucket_bytes,
        "exact_seconds_vs_full_tensor": seconds["exact"] / seconds[FULL_TENSOR],
        "allgather_seconds_vs_full_tensor": seconds["allgather"] / seconds[FULL_TENSOR],
        "switch_peak_vs_larger_state": max(max(rank.peak_bytes) / _larger(rank, bucket_bytes) for rank in ranks),
        "switch_peak_resident_vs_larger_state": max(
            max(rank.peak_resident_bytes) / _larger(rank, bucket_bytes) for rank in ranks
        ),
    }


def _larger(rank: ReshardFigures, bucket_bytes: int) -> int:
    return max(rank.update_bytes, rank.generation_bytes) + bucket_bytes


def _median_seconds(ranks: Sequence[ReshardFigures], way: str) -> float:
    return statistics.median(map(max, zip(*(rank.seconds[way] for rank in ranks), strict=True)))


def _rows(layout: UpdateLayout, ranks: Sequence[ReshardFigures], bucket_bytes: int) -> list[dict[str, object]]:
    least = max(rank.least_bytes for rank in ranks) / _MIB
    rows: list[dict[str, object]] = [
        {
            "layout": str(layout),
            "way": way,
            "seconds": _median_seconds(ranks, way),
            "received_mib": max(rank.received_bytes[way] for rank in ranks) / _MIB,
            "least_mib": least,
            "temporary_mib": max(max(rank.temporary_bytes[way]) for rank in ranks) / _MIB,
            "peak_by_ledger": None,
            "peak_resident": None,
        }
        for way in WAYS
    ]
    ratios = _ratios(ranks, bucket_bytes)
    switch: dict[str, object] = {
        **dict.fromkeys(rows[0]),
        "layout": str(layout),
        "way": f"whole switch, {EXECUTORS[0]}",
        "seconds": statistics.median(map(max, zip(*(rank.switch_seconds for rank in ranks), strict=True))),
        "peak_by_ledger": ratios["switch_peak_vs_larger_state"],
        "peak_resident": ratios["switch_peak_resident_vs_larger_state"],
    }
    return [*rows, switch]


def model_of(arguments: argparse.Namespace) -> DecoderConfig:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    head_size = arguments.hidden_size // arguments.num_heads
    return qwen3(**{name: getattr(arguments, name) for name in sizes}, head_size=head_size)
