"""Bytes of a step by link as planned, beside those that jobs of tiny models on CPUs then move.

Each case is a job of a few steps. The sample flow is planned twice: from the lengths of each row of the first step, and
from the mean lengths of all steps, as before a run. Bytes by rows are exact if the plan is the run's; those by means
differ where the deal of rows with other lengths does. A switch is planned for the first step, and for the later ones.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from spmdrl.config.config import load_config
from spmdrl.dataflow.samples.volume import Link, Volume
from spmdrl.job.rollouts.row_records import read_row_records
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.prepared import Prepared, prepare_without_weights
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.batch import Integers
from spmdrl.nouns.roles import POLICY
from spmdrl.plan.link_bytes import PlannedFlow, PlannedLengths, PlannedStep, sample_flow_bytes
from spmdrl.plan.resharding_bytes import resharding_bytes
from spmdrl.runtime.launch import LaunchEnvironment
from tests.bench.harness.bench_table import BenchTable
from tests.support.jobs import finished, metrics_of, run_job, tiny_config

Flow = Literal["samples by rows", "samples by means", "resharding", "swap"]
_STEPS = 8
_BATCH = (
    "data.train=synthetic://addition?low=0&high=99&count=400", "rollout.prompts_per_step=32",
    "rollout.num_generations=8",
)  # fmt: skip
_SPARSE = (
    "model.make.model_type=qwen3_moe", "model.make.num_experts=4", "model.make.num_experts_per_tok=2",
    "model.make.moe_intermediate_size=32",
)  # fmt: skip
_LATENT = ("model.make.model_type=deepseek_v3", "model.make.num_key_value_heads=2")
_HYBRID = ("model.make.model_type=qwen3_5_text", "model.make.num_hidden_layers=4")


@dataclass(frozen=True)
class TruthCase:
    """A job on this many ranks, equally many of them on each node."""

    name: str
    settings: tuple[str, ...] = ()
    ranks: int = 2
    ranks_per_node: int = 2


@dataclass(frozen=True)
class TruthRow:
    """Bytes of all ranks together over one link."""

    case: str
    flow: Flow
    link: str
    planned: int
    measured: int

    @property
    def error(self) -> float:
        """Share by which the plan is off."""
        return abs(self.planned - self.measured) / self.measured if self.measured else float(self.planned > 0)


def cases() -> list[TruthCase]:
    """Return the cases: the kinds of models, layouts, links, worker states and switches."""
    nodes = {"ranks": 4, "ranks_per_node": 2}
    return [
        TruthCase("one rank", ("reshard.swap=always",), ranks=1, ranks_per_node=1),
        TruthCase("dense", ("reshard.swap=always",)),
        TruthCase("dense, a rank a node", ("reshard.swap=always", "algo.kl_coef=0.1"), ranks_per_node=1),
        TruthCase("few rows", ("rollout.prompts_per_step=4", "rollout.num_generations=4"), **nodes),
        TruthCase("all-gather", ("reshard.executor=allgather", "reshard.bucket_bytes=40000"), **nodes),
        TruthCase("swap never", ("reshard.swap=never", "resources.update={shard: 0, tensor: 2}"), **nodes),
        TruthCase("replicas", ("resources.update={data: 0, shard: 2}", "resources.generation.tensor=2"), **nodes),
        TruthCase("pipeline", ("resources.update={shard: 0, pipeline: 2}",), **nodes),
        TruthCase("context", ("resources.update={shard: 0, context: 2, context_kind: ulysses}",), **nodes),
        TruthCase("reference and critic", ("critic={}", "algo={name: ppo, kl_coef: 0.1}", "reshard.swap=always")),
        TruthCase(
            "experts, routes replayed",
            (*_SPARSE, "resources.update.expert=2", "resources.generation={tensor: 2, expert: 2}",
             "train.routing.replay=rollout", "reshard.swap=always"),
            **nodes,
        ),
        TruthCase("latent", (*_LATENT, "resources.generation.tensor=2", "reshard.swap=always")),
        TruthCase("hybrid", (*_HYBRID, "reshard.swap=always")),
        TruthCase("adapters", ("lora={rank: 4}", "algo.kl_coef=0.1", "reshard.swap=always"), **nodes),
        TruthCase("adapters, merged", ("lora={rank: 4, merge: true}", "reshard.swap=always")),
        TruthCase("muon", ("optim.name=muon", "critic={}", "algo.name=ppo", "reshard.swap=always"), **nodes),
        TruthCase("rank sets", ("resources.ranks.generation=2", "algo.kl_coef=0.1"), **nodes),
        TruthCase("rank sets, lag", ("resources.ranks.generation=1", "rollout.lag=1", "lora={rank: 4}")),
        TruthCase("no locality", ("dock.locality=false",), **nodes),
        TruthCase("rows alike", ("dock.balance=rows", "algo.kl_coef=0.1"), **nodes),
        TruthCase(
            "environment", ("environment.function=calculator", "rollout.stop=['=']", "algo.kl_coef=0.1"), **nodes
        ),
    ]  # fmt: skip


def measure(case: TruthCase) -> list[TruthRow]:
    """Run a case's job. Raises AssertionError with its screen if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, run = tiny_config(folder), folder / "run"
        settings = [*_BATCH, *case.settings, f"train.max_steps={_STEPS}", f"run.dir={run}", "log.backends=[jsonl]"]
        job = run_job(
            "train", config, *settings, ranks=case.ranks, ranks_per_node=case.ranks_per_node, kind="cpu", timeout=600
        )  # fmt: skip
        finished(job)
        launch = LaunchEnvironment(world_size=case.ranks, local_world_size=case.ranks_per_node)
        checked = check_run(load_config([config], settings), "train", launch=launch)
        return list(_rows(case.name, checked, prepare_without_weights(checked), launch, run))


def _rows(
    case: str, checked: CheckedRun, prepared: Prepared, launch: LaunchEnvironment, run: Path
) -> Iterator[TruthRow]:
    """Yield planned and measured bytes of a finished run."""
    steps, decoders = metrics_of(run), {role: source.decoder for role, source in prepared.sources.items()}
    rows = lengths_of_rows(checked, prepared, run, step=1)
    if rows is not None:
        volume = PlannedStep(PlannedFlow(checked, decoders[POLICY], launch), *rows, step=1).volume
        yield from _by_link(case, "samples by rows", volume, steps[:1])
    volume = sample_flow_bytes(checked, decoders[POLICY], launch, _means(checked, steps)).volume
    yield from _by_link(case, "samples by means", volume, steps)
    planned = resharding_bytes(checked, decoders, launch, "cpu")
    # With a lag the last step generates nothing.
    last = [one for one in steps if "reshard/bytes" in one][-1]
    switches = (planned.first, steps[0]), (planned.later, last)
    for place, (received, metrics) in zip(("first", "later"), switches, strict=True):
        cross = int(metrics["reshard/cross_node_bytes"])
        near = int(metrics["reshard/bytes"]) - cross
        yield TruthRow(case, "resharding", f"node, {place}", received.same_node, near)
        yield TruthRow(case, "resharding", f"cross_node, {place}", received.cross_node, cross)
    if checked.config.reshard.swap == "always":
        swapped = int(steps[-1]["reshard/swapped_bytes"])
        yield TruthRow(case, "swap", "both ways", planned.to_host + planned.from_host, swapped)


def lengths_of_rows(checked: CheckedRun, prepared: Prepared, run: Path, step: int) -> tuple[Integers, Integers] | None:
    """Return a step's lengths of prompts [G] and responses [B] from a run's records; None if rows are missing.

    With a lag the dock's figures are of rows of two steps.
    """
    rollout, records = checked.config.rollout, read_row_records(run, step)
    num_prompts, num_rows = rollout.prompts_per_step, rollout.prompts_per_step * rollout.num_generations
    if records.keys() != set(range(num_rows)) or rollout.lag:
        return None
    serials = range((step - 1) * num_prompts, step * num_prompts)
    prompts = [len(prepared.prompts.at(serial).prompt_ids) for serial in serials]
    return np.array(prompts), np.array([records[row].length for row in range(num_rows)])


def _means(checked: CheckedRun, steps: Sequence[Mapping[str, float]]) -> PlannedLengths:
    """Return the mean lengths that a run's rows had, an environment's tokens included."""
    rollout = checked.config.rollout
    num_rows = rollout.prompts_per_step * rollout.num_generations
    response = sum(one["completions/mean_length"] + one.get("environment/tokens", 0.0) for one in steps) / len(steps)
    tokens = sum(one["perf/tokens"] for one in steps) / len(steps) / num_rows
    return PlannedLengths(tokens - response, response)


def _by_link(case: str, flow: Flow, volume: Volume, steps: Sequence[Mapping[str, float]]) -> Iterator[TruthRow]:
    """Yield the links of these steps, on average, and their sum."""
    measured = {link: sum(one[f"dock/bytes_{link.value}"] for one in steps) / len(steps) for link in Link}
    for link, num_bytes in measured.items():
        yield TruthRow(case, flow, link.value, volume.payload_bytes(link), round(num_bytes))
    yield TruthRow(case, flow, "all", sum(map(volume.payload_bytes, Link)), round(sum(measured.values())))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [case.name for case in cases()]
    parser.add_argument("--case", action="append", choices=names, metavar="NAME", help="run only this case")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Run the cases, and compare."""
    chosen = [case for case in cases() if arguments.case is None or case.name in arguments.case]
    rows = [row for case in chosen for row in measure(case)]
    flows = dict.fromkeys(row.flow for row in rows)
    return BenchTable(
        title=f"bench links: bytes of a step by link, planned and measured, of {len(chosen)} jobs",
        rows=[
            {"case": row.case, "flow": row.flow, "link": row.link, "planned": row.planned, "measured": row.measured,
             "error": row.error}
            for row in rows if row.planned or row.measured
        ],
        notes=tuple(_summary(flow, [row for row in rows if row.flow == flow and row.measured]) for flow in flows),
    )  # fmt: skip


def _summary(flow: Flow, rows: Sequence[TruthRow]) -> str:
    if not rows:
        return f"{flow}: nothing moved"
    worst = max(rows, key=lambda row: row.error)
    mean = sum(row.error for row in rows) / len(rows)
    return f"{flow}: mean error {mean:.2%} of {len(rows)} figures, worst {worst.error:.2%} ({worst.case}, {worst.link})"
