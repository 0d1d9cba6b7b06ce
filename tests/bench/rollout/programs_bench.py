"""Rows whose programs ask for turns, beside sessions in the worker that reply the same.

A step has so many conversations at once, each of so many turns of a tiny chat model, and after each turn a program or
session works (sleeps) for `--seconds`. Its ranks share this machine with all programs. Runs are made in turn, and of
each step the seconds are those of its fastest round; the first step of a run isn't counted.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import tempfile
from pathlib import Path

from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import check_steps, train_steps
from tests.bench.rollout.sessions import fastest
from tests.support.chat_model import make_chat_model

_CODE = """
import http.client, json, os, time
from urllib.parse import urlsplit
from spmdrl.engines.environment.episode import End, Reply

def user(number):
    return {"role": "user", "content": str(number)}

class Sessions:
    def open(self, row):
        return Session()

class Session:
    num_turns = 0

    def step(self, turn):
        time.sleep(SECONDS)
        self.num_turns += 1
        return End(1.0) if self.num_turns == TURNS else Reply([user(self.num_turns)])

def program(row):
    server = http.client.HTTPConnection(urlsplit(os.environ["OPENAI_BASE_URL"]).netloc)
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    messages = [user(row.prompt)]
    for number in range(1, TURNS + 1):
        server.request("POST", "/v1/chat/completions", json.dumps({"messages": messages}), key)
        messages += [json.load(server.getresponse())["choices"][0]["message"], user(number)]
        time.sleep(SECONDS)
    return 1.0
"""
_GROUP = 8
_PER_TURN = 24
"""room for the tokens of a turn and its reply"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=200, help=f"rows of a step, in groups of {_GROUP}")
    parser.add_argument("--turns", type=int, default=5, help="turns of each row")
    parser.add_argument("--seconds", type=float, default=0.0, help="work after each turn")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run, the first of which is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="how often both run in turn")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Train with both in turn. Raises RuntimeError with the end of a run's stderr if it fails."""
    check_steps(arguments.steps)
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        code = _CODE.replace("SECONDS", str(arguments.seconds)).replace("TURNS", str(arguments.turns))
        (folder / "code.py").write_text(code)
        make_chat_model(folder / "model", ["Yes."])
        settings = {
            "sessions": {"environment.function": f"{folder / 'code.py'}:Sessions"},
            "programs": {"environment.program": f"{folder / 'code.py'}:program"},
        }
        runs = {kind: functools.partial(_train, arguments, folder, own) for kind, own in settings.items()}
        found = {kind: turn.results for kind, turn in in_turn(runs, arguments.rounds).items()}
    rows = []
    for kind, rounds in found.items():
        means = {
            shown: statistics.mean(fastest(rounds, name)) for shown, name in
            (("step s", "time/step"), ("generation s", "time/generation"), ("turns", "environment/turns"),
             ("call s", "environment/seconds"), ("open s", "environment/open_seconds"))
        }  # fmt: skip
        per_second = arguments.sessions * means["turns"] / means["generation s"]
        rows.append({"environment": kind, **means, "turns/s": per_second})
    given = f"{arguments.sessions} rows at once, {arguments.ranks} ranks, {arguments.seconds:g} s after each turn"
    slower = rows[1]["generation s"] / rows[0]["generation s"]
    return BenchTable(
        title=f"bench programs: {given}",
        rows=rows,
        notes=(f"programs_vs_sessions {slower:.3f} (generation)",),
        details={"ratios": {"programs_vs_sessions": slower}},
        passed=all(row["turns"] > arguments.turns / 2 for row in rows),
    )


def _train(arguments: argparse.Namespace, folder: Path, own: dict[str, str]) -> list[dict[str, float]]:
    settings = {
        "model.path": folder / "model", "data.train": "synthetic://addition?low=0&high=9&count=40",
        "data.chat_template": "always", "rollout.prompts_per_step": arguments.sessions // _GROUP,
        "rollout.num_generations": _GROUP, "rollout.max_completion_length": _PER_TURN * (arguments.turns + 2),
        "train.max_steps": arguments.steps, "eval.before_train": "false", "resources.device": "cpu",
        # Other work on the machine is no failure of a program.
        "environment.timeout_seconds": 600, "environment.open_timeout_seconds": 600, **own,
    }  # fmt: skip
    steps = train_steps(folder / "run", settings, num_ranks=arguments.ranks)
    shutil.rmtree(folder / "run")
    return steps
