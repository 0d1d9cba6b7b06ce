"""Rows whose programs ask for turns, beside sessions in the worker that reply the same.

A step has so many conversations at once, each of so many turns of a chat model; its layers are work without effect, and
after each turn a program or session works (sleeps) for `--seconds`. Messages name their row: rows that lack a turn,
hold another row's message or have another one's reward are counted. The ranks share this machine with all programs.
Runs are made in turn, and of each step the seconds are those of its fastest round; the first step of a run isn't
counted.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import check_steps, train_steps
from tests.bench.rollout.sessions import fastest
from tests.support.chat_model import make_chat_model

_SESSIONS = """
import time
from spmdrl.engines.environment.episode import End, Reply

TURNS, SECONDS = SIZES

def name_of(row):
    return row.seed % 1_000_000

def user(row, number):
    return {"role": "user", "content": f"{name_of(row)} {number}"}

class Sessions:
    has_openings = True

    def open(self, row):
        return Session(row)

class Session:
    def __init__(self, row):
        self.row, self.num_turns = row, 0
        self.opening = f" {name_of(row)} 0"

    def step(self, turn):
        time.sleep(SECONDS)
        self.num_turns += 1
        return End(float(name_of(self.row))) if self.num_turns == TURNS else Reply([user(self.row, self.num_turns)])

def program(row):
    messages = [user(row, 0)]
    ask = client()
    for number in range(1, TURNS + 1):
        messages += [ask(messages), user(row, number)]
        time.sleep(SECONDS)
    return float(name_of(row))
"""
_CLIENTS = {
    "http": """
import http.client, json, os
from urllib.parse import urlsplit

def client():
    server = http.client.HTTPConnection(urlsplit(os.environ["OPENAI_BASE_URL"]).netloc)
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}

    def ask(messages):
        server.request("POST", "/v1/chat/completions", json.dumps({"messages": messages}), key)
        return json.load(server.getresponse())["choices"][0]["message"]

    return ask
""",
    "openai": """
from openai import OpenAI

def client():
    completions = OpenAI(timeout=3600.0).chat.completions
    return lambda messages: completions.create(model="policy", messages=messages).choices[0].message
""",
}
_GROUP, _WIDTH = 8, 2048
_PER_TURN = 32
"""room for the tokens of a turn and its reply"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=200, help=f"rows of a step, in groups of {_GROUP}")
    parser.add_argument("--turns", type=int, default=5, help="turns of each row")
    parser.add_argument("--layers", type=int, default=1, help="of the model, each of 0.9M parameters")
    parser.add_argument("--client", choices=_CLIENTS, default="http", help="of the programs")
    parser.add_argument("--only", choices=("sessions", "programs"), help="runs of one kind; default: both")
    parser.add_argument("--seconds", type=float, default=0.0, help="work after each turn")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run, the first of which is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="how often both run in turn")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Train with both in turn. Raises RuntimeError with the end of a run's stderr if it fails."""
    check_steps(arguments.steps)
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        sizes = f"{arguments.turns}, {arguments.seconds}"
        (folder / "code.py").write_text(_SESSIONS.replace("SIZES", sizes) + _CLIENTS[arguments.client])
        make_chat_model(folder / "model", ["Yes."], _PER_TURN * (arguments.turns + 4), arguments.layers, _WIDTH)
        settings = {
            "sessions": {"environment.function": f"{folder / 'code.py'}:Sessions"},
            "programs": {"environment.program": f"{folder / 'code.py'}:program"},
        }
        runs = {
            kind: functools.partial(_train, arguments, folder, own)
            for kind, own in settings.items() if arguments.only in (None, kind)
        }  # fmt: skip
        found = {kind: turn.results for kind, turn in in_turn(runs, arguments.rounds).items()}
    rows = []
    for kind, rounds in found.items():
        means = {
            shown: statistics.mean(fastest([steps for steps, _ in rounds], name)) for shown, name in
            (("step s", "time/step"), ("generation s", "time/generation"), ("turns", "environment/turns"),
             ("call s", "environment/seconds"), ("open s", "environment/open_seconds"))
        }  # fmt: skip
        per_second = arguments.sessions * means["turns"] / means["generation s"]
        wrong = sum(num for _, num in rounds)
        rows.append({"environment": kind, **means, "turns/s": per_second, "wrong rows": wrong})
    given = (
        f"{arguments.sessions} rows at once, {arguments.ranks} ranks, {arguments.layers} layers, "
        f"{arguments.seconds:g} s after each turn, client {arguments.client}"
    )
    ratios = {}
    if len(rows) > 1:
        ratios["programs_vs_sessions"] = rows[1]["generation s"] / rows[0]["generation s"]
    return BenchTable(
        title=f"bench programs: {given}",
        rows=rows,
        notes=tuple(f"{name} {ratio:.3f} (generation)" for name, ratio in ratios.items()),
        details={"ratios": ratios},
        passed=not any(row["wrong rows"] for row in rows),
    )


def _train(arguments: argparse.Namespace, folder: Path, own: dict[str, str]) -> tuple[list[dict[str, float]], int]:
    """Return the metrics of the steps that count, and the number of wrong rows in all steps."""
    settings = {
        "model.path": folder / "model", "data.train": "synthetic://addition?low=0&high=9&count=40",
        "data.chat_template": "always", "rollout.prompts_per_step": arguments.sessions // _GROUP,
        "rollout.num_generations": _GROUP, "rollout.max_completion_length": _PER_TURN * (arguments.turns + 2),
        "train.max_steps": arguments.steps, "eval.before_train": "false", "resources.device": "cpu",
        "log.samples_per_step": arguments.sessions, "rollout.temperature": 0.5,
        # Other work on the machine is no failure of a program.
        "environment.timeout_seconds": 600, "environment.open_timeout_seconds": 600, **own,
    }  # fmt: skip
    steps = train_steps(folder / "run", settings, num_ranks=arguments.ranks)
    samples = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    num_right = sum(_is_right(sample, arguments.turns) for sample in samples)
    shutil.rmtree(folder / "run")
    return steps, arguments.steps * arguments.sessions - num_right


def _is_right(sample: dict[str, Any], num_turns: int) -> bool:
    """Return True if a row has all turns, each behind its own message, and its own reward."""
    found = re.findall(r"(\d+) (\d+)", sample["response"])
    numbers = [int(number) for _, number in found]
    return {float(name) for name, _ in found} == {sample["reward"]} and numbers == [*range(num_turns)]
