"""`spmdrl bench NAME`: one module a bench, a table on the screen, `--json` for machines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from spmdrl.bench import (
    layouts,
    memory,
    metadata,
    nodes,
    redundancy,
    resharding,
    rollout,
    samples,
    step,
    swap,
    table1,
    training,
)
from spmdrl.bench.table import BenchTable


class Bench(Protocol):
    """What a bench module offers; its docstring's first line is its help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> BenchTable: ...


BENCHES: dict[str, Bench] = {
    "layouts": layouts,
    "memory": memory,
    "metadata": metadata,
    "nodes": nodes,
    "redundancy": redundancy,
    "resharding": resharding,
    "rollout": rollout,
    "samples": samples,
    "step": step,
    "swap": swap,
    "table1": table1,
    "training": training,
}
ON_SCREEN = Path("-")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="spmdrl bench", description="Measure, and print a table.")
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, bench in BENCHES.items():
        summary = (bench.__doc__ or "").strip().splitlines()[0]
        layout = argparse.RawTextHelpFormatter
        sub = names.add_parser(name, help=summary, description=bench.__doc__, formatter_class=layout)
        bench.add_arguments(sub)
        json_help = "also write the rows to FILE, or print them instead of the table where no FILE is given"
        sub.add_argument("--json", type=Path, nargs="?", const=ON_SCREEN, metavar="FILE", help=json_help)
    arguments = parser.parse_args(argv)
    table = BENCHES[arguments.name].run(arguments)
    if arguments.json == ON_SCREEN:
        sys.stdout.write(table.to_json())
    else:
        table.print(sys.stdout)
        if arguments.json is not None:
            arguments.json.write_text(table.to_json())
    return 0 if table.passed else 1
