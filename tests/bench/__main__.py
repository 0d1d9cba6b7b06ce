"""`python -m tests.bench NAME`: one module per bench, a table on the screen, `--json` for machines."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TextIO, cast

from spmdrl.config.reader import ConfigError


class BenchResult(Protocol):
    """What a bench found."""

    @property
    def passed(self) -> bool: ...
    def print(self, stream: TextIO) -> None: ...
    def to_json(self) -> str: ...


class Bench(Protocol):
    """What a bench module offers; its docstring's first line is its help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> BenchResult: ...


# The module of each bench below this package. Most bring torch with them: only the one that runs is imported.
BENCHES = {
    "accelerator": "accelerator.accelerator_bench",
    "ahead": "rollout.ahead",
    "algorithms": "learning.algorithms_bench",
    "balance": "samples.balance_bench",
    "checkpoints": "training.checkpoint_waits",
    "faults": "faults.faults_bench",
    "foreign": "plan.foreign_rows",
    "fusion": "training.fusion",
    "lags": "learning.lags_bench",
    "layouts": "layouts.layouts",
    "links": "plan.link_truth",
    "memory": "memory.memory_bench",
    "overhead": "training.overhead",
    "pages": "pages.pages",
    "paper": "paper.paper_bench",
    "metadata": "samples.metadata",
    "nodes": "nodes.nodes",
    "plan": "plan.plan_bench",
    "programs": "rollout.programs_bench",
    "redundancy": "resharding.redundancy",
    "resharding": "resharding.resharding",
    "rollout": "rollout.rollout",
    "samples": "samples.samples_bench",
    "sessions": "rollout.sessions",
    "sources": "learning.sources",
    "soak": "training.soak",
    "step": "training.step",
    "times": "plan.stage_times",
    "training": "training.training",
    "unfit": "plan.unfit",
}
ON_SCREEN = Path("-")


def main(argv: Sequence[str]) -> int:
    """Run one bench. Returns 0 if its figures are within its limits, 1 otherwise, and 2 if the input is wrong."""
    # Read when torch is imported: its warnings of lost connections are pages of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure, and print a table.")
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    # A name that isn't there is left to the parser's message.
    wanted = next((argument for argument in argv if argument in BENCHES), None)
    for name in BENCHES:
        doc = docstring_of(name)
        layout = argparse.RawTextHelpFormatter
        sub = names.add_parser(name, help=doc.splitlines()[0], description=doc, formatter_class=layout)
        if name == wanted:
            bench_named(name).add_arguments(sub)
        json_help = "also write the rows to FILE, or print them instead of the table where no FILE is given"
        sub.add_argument("--json", type=Path, nargs="?", const=ON_SCREEN, metavar="FILE", help=json_help)
    arguments = parser.parse_args(argv)
    try:
        table = bench_named(arguments.name).run(arguments)
    except ConfigError as error:
        sys.stderr.write(f"bench {arguments.name}: {error}\n")
        return 2
    if arguments.json == ON_SCREEN:
        sys.stdout.write(table.to_json())
    else:
        table.print(sys.stdout)
        if arguments.json is not None:
            arguments.json.write_text(table.to_json())
    return 0 if table.passed else 1


def bench_named(name: str) -> Bench:
    return cast(Bench, importlib.import_module(f"{__package__}.{BENCHES[name]}"))


def docstring_of(name: str) -> str:
    """The docstring of a bench's module, read from its source without importing it."""
    path = Path(__file__).parent / f"{BENCHES[name].replace('.', '/')}.py"
    source = path.read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").strip()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
