"""Every update layout of 2, 4 or 8 ranks beside one process: loss, gradients, weights, and the bytes of each axis.

Tiny models take a few AdamW steps in float32 on rows of mixed lengths, on gloo ranks of this host. An error is the
largest difference of an element over the largest reference value of its tensor, all steps and ranks together. Bytes
are those that all ranks together send in one step. The exit status is 1 if any error is above 1e-5.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from spmdrl.engines.training.parallelize import check_layout
from spmdrl.resources.layout import ContextKind, UpdateLayout, fit_update_layout
from tests.bench.harness.bench_models import LAYOUT_MODELS as MODELS
from tests.bench.harness.bench_ranks import BenchRanks
from tests.bench.harness.bench_table import BenchTable
from tests.bench.layouts.layout_cases import LayoutCase
from tests.bench.layouts.layout_parity import LayoutErrors, compare_cases, write_references

LARGEST_ERROR = 1e-5
_ERRORS = ("loss_error", "gradient_error", "weight_error")
_CHUNKS = {"gpipe": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2}
"""Chunks a rank of the schedules other than 1f1b."""
_MESHES_OF_RANKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=_numbers, default=[2, 4], metavar="N,...", help="ranks; 2,4 unless given")
    parser.add_argument("--models", type=_models, default=list(MODELS), metavar="NAME,...", help=", ".join(MODELS))


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not set(numbers) <= {2, 4, 8}:
        raise argparse.ArgumentTypeError(f"{text} is not of 2, 4 and 8, for which the tiny models are made")
    return numbers


def _models(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(MODELS):
        raise argparse.ArgumentTypeError(f"there is no model {', '.join(sorted(unknown))}; choose from {list(MODELS)}")
    return names


@dataclass(frozen=True)
class Comparison:
    """A row for each layout that ran, and the reason for each that is refused."""

    rows: list[dict[str, object]]
    refused: list[dict[str, object]]


def run(arguments: argparse.Namespace) -> BenchTable:
    """Compare all layouts of the chosen sizes and models."""
    parts = [compare_layouts(num_ranks, cases_of(arguments.models, num_ranks)) for num_ranks in arguments.world_size]
    rows = [row for part in parts for row in part.rows]
    refused = [row for part in parts for row in part.refused]
    wrong = [row for row in rows if exceeds(row)]
    return BenchTable(
        title=f"bench layouts: {len(rows)} layouts beside one process, {len(wrong)} of them off by more than "
        f"{LARGEST_ERROR:g}",
        rows=rows,
        notes=tuple("refused: {model} on {world_size} ranks, {layout}: {reason}".format(**row) for row in refused),
        details={"refused": refused},
        passed=not wrong,
    )


def exceeds(row: Mapping[str, object]) -> bool:
    """Whether any error of a row is above the limit or NaN."""
    return not all(row[error] <= LARGEST_ERROR for error in _ERRORS)


def cases_of(models: Sequence[str], num_ranks: int) -> list[LayoutCase]:
    """Every model under every layout of so many ranks."""
    return [LayoutCase(model, layout) for model in models for layout in layouts_of(model, num_ranks)]


def compare_layouts(num_ranks: int, cases: Sequence[LayoutCase]) -> Comparison:
    """Run those of the cases, of so many ranks, that their models allow."""
    reasons = {case: _refusal(case) for case in cases}
    found = run_cases([case for case in cases if not reasons[case]], num_ranks)
    named = {case: {"model": case.model, "world_size": num_ranks, "layout": str(case.layout)} for case in cases}
    return Comparison(
        rows=[named[case] | asdict(found[case]) for case in cases if case in found],
        refused=[named[case] | {"reason": reasons[case]} for case in cases if reasons[case]],
    )


def run_cases(cases: Sequence[LayoutCase], num_ranks: int) -> dict[LayoutCase, LayoutErrors]:
    """Compare all cases with one process. Raises RuntimeError with the traceback of the first rank to fail."""
    by_degrees = operator.attrgetter("degrees")
    errors: dict[LayoutCase, LayoutErrors] = {}
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        alone = list({case.reference_path(folder): case for case in cases}.values())
        BenchRanks(1, start_method="forkserver").call(write_references, alone, folder)
        # Ranks take longer to start than tiny models to train: one set of them for the cases of several meshes, but not
        # for all, as no mesh is closed before its ranks end.
        meshes = [list(group) for _, group in itertools.groupby(sorted(cases, key=by_degrees), key=by_degrees)]
        for first in range(0, len(meshes), _MESHES_OF_RANKS):
            some = meshes[first : first + _MESHES_OF_RANKS]
            by_rank = BenchRanks(num_ranks, start_method="forkserver").call(compare_cases, some, folder)
            for case, found in zip(itertools.chain(*some), zip(*by_rank, strict=True), strict=True):
                errors[case] = functools.reduce(operator.or_, found)
    return errors


def _refusal(case: LayoutCase) -> str | None:
    """The engine's reason why a model can't be trained so."""
    try:
        check_layout(case.config, case.layout)
    except ValueError as error:
        return str(error)
    return None


def layouts_of(model: str, num_ranks: int) -> list[UpdateLayout]:
    """Every layout of exactly so many ranks; experts are spread where there are some.

    Pipelines run 1f1b, and the other schedules too where no other axis is in use or only shard, tensor and expert.
    """
    layouts = []
    for dense in _dense_layouts(num_ranks):
        num_expert_ranks = dense.data * dense.shard * dense.context
        degrees = _divisors(num_expert_ranks) if MODELS[model].moe else [1]
        layouts += [fit_update_layout(replace(dense, expert=expert), num_ranks) for expert in degrees]
    return layouts


def _dense_layouts(num_ranks: int) -> Iterator[UpdateLayout]:
    for data, shard, pipeline, context, tensor in _factorizations(num_ranks, 5):
        layout = UpdateLayout(data=data, shard=shard, pipeline=pipeline, context=context, tensor=tensor)
        for kind in get_args(ContextKind) if context > 1 else ("ring",):
            yield replace(layout, context_kind=kind)
        if pipeline > 1 and data == context == 1:
            for schedule, chunks in _CHUNKS.items():
                yield replace(layout, pipeline_schedule=schedule, pipeline_chunks=chunks)


def _factorizations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many ordered factors."""
    if num_factors == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorizations(number // first, num_factors - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
