"""What was written for other trainers, trained here without a change to it: rewards before and after.

Functions and a class in TRL's form, the MCP server and the programs are those of docs/environments.md; SkyRL-gym,
gymnasium, reasoning-gym, mcp and openai must be installed. verifiers, whose mcp is older than ours, is left out if it
isn't installed. Turns of the models that talk are among a few texts, each as likely as the others before training;
models of reasoning-gym's tasks have a supervised start. Glue is the lines that a run needs besides: a key of its
config. Rewards are the means of sampled rows over a tenth of the steps, the first and the last, and must rise.

With --kills, short runs on two ranks, each of which is killed at a moment and started again. They must end as one that
nothing disturbed, to the bit. So must runs on one rank and on two that sum up gradients in one order. Of tools that
never answer alike, no answer that was recorded may be asked for again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from spmdrl.config.reader import ConfigError
from spmdrl.runtime.screen import show
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.train_runs import train_steps
from tests.bench.learning.foreign_sources import SOURCES, VERIFIERS, settings_of, write_files
from tests.bench.learning.killed_sources import COMPARED, EQUAL, IMPURE, MOMENTS, ONCE, is_kept, killed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources_help = f"all unless given: {', '.join(SOURCES)}; with --kills also {', '.join(IMPURE)}"
    parser.add_argument("--sources", nargs="+", metavar="NAME", help=sources_help)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16, help="of a step, with 16 rows each; programs' have fewer")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run")
    parser.add_argument(
        "--kills", nargs="*", metavar="MOMENT", help=f"kill at these moments, all unless given: {', '.join(MOMENTS)}"
    )


def run(arguments: argparse.Namespace) -> BenchTable:
    """Train on each in turn. Raises ConfigError for one that isn't known, RuntimeError if a run fails."""
    known = SOURCES if arguments.kills is None else {**SOURCES, **IMPURE}
    names = arguments.sources or [name for name in known if name != VERIFIERS or find_spec("verifiers")]
    for flag, given, there in ("--sources", names, known), ("--kills", arguments.kills or (), MOMENTS):
        if unknown := [name for name in given if name not in there]:
            raise ConfigError(f"{flag} {unknown[0]!r} isn't one of {', '.join(there)}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-", ignore_cleanup_errors=True) as root:
        for number, name in enumerate(names):
            folder = Path(root) / str(number)
            folder.mkdir()
            write_files(folder)
            if arguments.kills is None:
                rows.append(_trained(name, folder, arguments))
            else:
                rows.append(killed(name, known[name], folder, arguments.kills or list(MOMENTS)))
            show(", ".join(map(str, rows[-1].values())), stream=sys.stderr)
    if arguments.kills is not None:
        return BenchTable(
            title="bench sources: killed and started again",
            rows=rows,
            notes=(f"{EQUAL}: {COMPARED}", f"{ONCE}: each answer that was recorded is used"),
            passed=all(map(is_kept, rows)),
        )
    return BenchTable(
        title=f"bench sources: {arguments.ranks} ranks, {arguments.steps} steps",
        rows=rows,
        passed=all(row["after"] > row["before"] for row in rows),
    )


def _trained(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    source = SOURCES[name]
    settings = {"train.max_steps": arguments.steps, "rollout.prompts_per_step": arguments.prompts}
    settings |= settings_of(source, folder, folder / "model")
    steps = train_steps(folder / "run", settings, num_ranks=arguments.ranks)
    rewards = [step["reward"] for step in steps]
    tenth = max(1, len(rewards) // 10)
    return {"source": name, "glue": source.setting, "before": fmean(rewards[:tenth]), "after": fmean(rewards[-tenth:]),
            "turns": fmean(step.get("environment/turns", 1.0) for step in steps[-tenth:])}  # fmt: skip
