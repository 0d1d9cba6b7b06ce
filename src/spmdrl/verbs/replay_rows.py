"""The `replay` verb: rows of a step generated, rewarded and trained again, beside the run's records of them."""

from __future__ import annotations

import argparse
import bdb
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError, start_up
from spmdrl.dataflow.stages.reward import RewardFailure
from spmdrl.job.rollouts.row_records import RowDigests, read_row_records
from spmdrl.job.run.run import Run
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import check_run
from spmdrl.job.training import build
from spmdrl.observability.jsonl import to_json
from spmdrl.observability.report.replay_section import ReplayedRow, replay_section
from spmdrl.observability.report.report import write_report
from spmdrl.observability.terminal.console import Console
from spmdrl.runtime.launch import read_launch_environment
from spmdrl.runtime.screen import output_file, show, waiting
from spmdrl.verbs.replay_plan import ReplayPlan, config_of_step, plan_replay, replay_config
from spmdrl.verbs.replay_watch import ReplayWatch, StepReplayed
from spmdrl.verbs.train import loop, set_kernels

DIFFERS = 1
_COMPARED = {
    "length": "number of tokens",
    "tokens": "tokens",
    "logprobs": "generator's log-probs",
    "reward": "reward",
    "advantages": "advantages",
    "trainer": "trainer's log-probs",
    "loss": "loss terms",
}
"""compared facts, by their field of RowDigests"""
_LEFT_DEBUGGER = 130


def main(argv: Sequence[str]) -> int:
    """Replay rows, write them into a report, and return 1 if one differs from the run's record."""
    arguments = _parser().parse_intermixed_args(argv)
    if read_launch_environment(os.environ).world_size > 1:
        raise ConfigError("replay runs in one process; start it without a launcher: python -m spmdrl replay ...")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="spmdrl_replay_")))
        with start_up():
            plan = plan_replay(arguments.run, arguments.step, arguments.checkpoint)
            loaded = load_config([config_of_step(plan.run, plan.step)], arguments.overrides, "replay")
            checked = check_run(replay_config(loaded, plan, folder), verb="train")
        show(_described(plan), stream=sys.stderr)
        try:
            rows = _replayed(checked, plan, arguments.row, stops=arguments.pdb)
        except bdb.BdbQuit:
            return _LEFT_DEBUGGER
        again = read_row_records(folder, plan.step)
        found = [_compared(row, again.get(row.row), plan.recorded.get(row.row)) for row in rows]
        for row in found:
            facts = "\n".join(f"  {name:10}{text}" for name, text in row.facts.items())
            show(f"step {row.step}, row {row.row}\n{facts}\n  {row.comparison}\n")
        out = arguments.output or arguments.run / f"report_step_{plan.step:06d}.html"
        with start_up():
            show(f"report: {write_report(arguments.run, out=out, more=[replay_section(found)])}")
            if arguments.json is not None:
                content = {"run": str(plan.run), "rows": [asdict(row) for row in found]}
                arguments.json.write_text(to_json(content, indent=1) + "\n")
    return DIFFERS if any(row.differences for row in found) else 0


def _replayed(checked: CheckedRun, plan: ReplayPlan, rows: Sequence[int], *, stops: bool) -> list[ReplayedRow]:
    """Run the training loop from the checkpoint to the end of the step's update."""
    config = checked.config
    set_kernels(config.debug)
    with ExitStack() as stack:
        world = stack.enter_context(open_job(checked))
        run = Run(checked, world)
        run.console = Console(enabled=False)
        with start_up(), waiting("replay: loading the run", enabled=not stops):
            training = build(checked, run, stack)
        watch = ReplayWatch(plan.step, rows, training.prepared.tokenizer, config.reward, stops=stops)
        training.stages.hooks.append(watch)
        try:
            with waiting(f"replay: step {plan.first_step} to {plan.step}", enabled=not stops):
                loop(training)
        except StepReplayed:
            return watch.found
        except RewardFailure as failure:
            raise ConfigError(str(failure)) from failure
    raise ConfigError(f"the run ended before step {plan.step}: {plan.checkpoint} is of one that was finished early")


def _compared(row: ReplayedRow, again: RowDigests | None, recorded: RowDigests | None) -> ReplayedRow:
    """Return the row beside the run's record of it; None in place of digests if a step left the row out."""
    if recorded is None:
        return row
    if again is None:
        return replace(row, is_recorded=True, differences=["whether the row is trained"])
    is_same = {text: getattr(again, name) == getattr(recorded, name) for name, text in _COMPARED.items()}
    differences = [text for text, same in is_same.items() if not same]
    same = [text for name, text in _COMPARED.items() if is_same[text] and getattr(recorded, name) is not None]
    return replace(row, is_recorded=True, differences=differences, same=same)


def _described(plan: ReplayPlan) -> str:
    start = plan.checkpoint or "the start of the run"
    steps = f"step {plan.step}" if plan.first_step == plan.step else f"steps {plan.first_step} to {plan.step}"
    ranks = "" if plan.ranks == 1 else f", which {plan.ranks} ranks did"
    return f"replay: {steps} in one process{ranks}, from {start}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmdrl replay",
        description="Does a step of a training run again in one process, from the checkpoint before it, and writes a "
        "report of the run with rows of it token by token: log-probs of generator and trainer, advantage, ratio, term "
        "of the loss and its gradient. Compares them to the bit with what the run recorded, and exits with 1 where "
        "they differ. It takes the time and memory of a whole step, and reads the files that the run read: start it "
        "in the same directory.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="the step, from 1")
    parser.add_argument(
        "--row", type=int, required=True, action="append", help="a row of the step, from 0; may be given several times"
    )
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint's folder; the newest one before the step else")
    parser.add_argument(
        "-o", "--output", type=output_file, metavar="FILE",
        help="where to write the report instead of RUN/report_step_STEP.html",
    )  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows as JSON, too")
    parser.add_argument(
        "--pdb", action="store_true", help="stop in the debugger before generation, reward and loss of the rows"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="settings to change, such as data.train=moved.jsonl"
    )
    return parser
