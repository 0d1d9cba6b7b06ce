"""Whole jobs whose rows take turns with an environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.bench.faults.planned_faults import VARIABLE
from tests.support.chat_model import make_chat_model
from tests.support.jobs import (
    IN_ONE_ORDER,
    ROOT,
    be_job,
    environment,
    finished,
    inline_config,
    metrics_of,
    run_job,
    untimed,
    weights_digest,
)
from tests.support.ranks import end, fork

from spmdrl.engines.generation.protocol import ENDS

ENVIRONMENT = """
from pathlib import Path
from spmdrl.engines.environment.episode import End, Episode, Observation

class Adding:
    def step(self, episode: Episode):
        with open(Path(__file__).with_name("calls"), "a") as calls:
            calls.write("step\\n")
        if len(episode.turns) == 3:
            return End()
        return Observation(str(episode.seed % 100))
"""
LONG = [
    "model.make.max_position_embeddings=64", "rollout.max_completion_length=48", "rollout.stop=[=, +]",
    "train.max_steps=4", "checkpoint.interval=2", "checkpoint.keep_last=9",
]  # fmt: skip

# Where no response goes on in a later step, one step on either side of the crash shows as much as two.
SHORT = ["train.max_steps=2", "checkpoint.interval=1", "rollout.max_completion_length=24"]


def settings_of(folder: Path, name: str) -> list[str]:
    (folder / "adding.py").write_text(ENVIRONMENT)
    return [f"run.dir={folder / name}", f"environment.function={folder / 'adding.py'}:Adding", *LONG]


def calls_of(folder: Path) -> int:
    """Steps of the environment so far."""
    return len((folder / "calls").read_text().splitlines())


def samples_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


DYING = {
    "one rank": (1, []),
    "experts over replicas": (
        2,
        [
            *SHORT,
            "model.make.model_type=qwen3_moe",
            "model.make.num_experts=4",
            "model.make.num_experts_per_tok=2",
            "model.make.moe_intermediate_size=32",
            "resources.generation.expert=2",
            "train.routing.replay=rollout",
        ],
    ),
    "tensor parallel": (2, [*SHORT, "resources.generation.tensor=2", "algo.kl_coef=0.1", "train.updates_per_step=2"]),
    "over several steps": (
        2,
        ["rollout.partial_max_rounds=3", "rollout.partial_extra_prompts=8", "algo.rollout_is=tis"],
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "more"),
    [pytest.param(*case, id=name, marks=pytest.mark.slow if case[0] > 1 else ()) for name, case in DYING.items()],
)
def test_a_run_that_dies_goes_on_to_the_bit(tmp_path, ranks, more):
    config, settings = inline_config(tmp_path), [*settings_of(tmp_path, "run"), *more]
    folder = tmp_path / "run"
    finished(run_job("train", config, *settings, ranks=ranks))
    whole, samples = untimed(metrics_of(folder)), samples_of(folder)
    last, before = len(whole), len(whole) // 2
    digest = weights_digest(folder, last)
    assert all(1 < step["environment/turns"] <= 4 and step["environment/tokens"] > 0 for step in whole)
    assert all(step["mismatch/abs_max"] < 1e-4 and step["grad_norm"] > 0 for step in whole)
    for sample in samples:
        assert "".join(text for turn in sample["turns"] for text in turn) == sample["response"]
        num_read = sum(len(observation) for _, observation in sample["turns"])
        is_trained = any(advantage is not None for _, advantage, _ in sample["tokens"])
        assert not is_trained or sum(advantage is None for _, advantage, _ in sample["tokens"]) == num_read
    shutil.rmtree(folder / "checkpoints" / f"step_{last:06d}")
    assert f"after step {before}" in finished(run_job("train", config, *settings, ranks=ranks)).stdout
    assert untimed(metrics_of(folder)) == whole and weights_digest(folder, last) == digest
    assert samples_of(folder) == samples


@pytest.mark.ranks
@pytest.mark.slow
def test_recorded_and_kept_rows_need_no_second_call(tmp_path):
    config = inline_config(tmp_path)
    record = [*settings_of(tmp_path, "one"), f"debug.rollouts_to={tmp_path / 'rows'}", "checkpoint.keep_rollouts=true"]
    finished(run_job("train", config, *record))
    whole, digest, num_calls = (
        untimed(metrics_of(tmp_path / "one")),
        weights_digest(tmp_path / "one", 4),
        calls_of(tmp_path),
    )
    assert num_calls > 100
    replay = [*settings_of(tmp_path, "two"), f"debug.rollouts_from={tmp_path / 'rows'}"]
    finished(run_job("train", config, *replay))
    assert calls_of(tmp_path) == num_calls
    assert weights_digest(tmp_path / "two", 4) == digest
    assert [step["loss"] for step in metrics_of(tmp_path / "two")] == [step["loss"] for step in whole]
    # As if it had been killed in the update of step 3.
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step_000004")
    resumed = finished(run_job("train", config, *record))
    assert "step 3 goes on with the rollouts in" in resumed.stdout
    assert weights_digest(tmp_path / "one", 4) == digest
    assert calls_of(tmp_path) < 1.5 * num_calls, "step 3's were kept"


PAYING = """
from spmdrl.engines.environment.episode import End, Observation

class Paying:
    def step(self, episode):
        if len(episode.turns) == 3:
            return End(reward=-1.0)
        return Observation("12", reward=0.25 * (episode.seed % 2))
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_critic_learns_what_turns_earned_also_from_recorded_rows(tmp_path):
    config, found = inline_config(tmp_path), []
    (tmp_path / "paying.py").write_text(PAYING)
    for name, rows in (("one", "to"), ("two", "from")):
        settings = [
            f"run.dir={tmp_path / name}", f"environment.function={tmp_path / 'paying.py'}:Paying", *LONG,
            "algo={name: ppo, kl_coef: 0.0}", "critic={lam: 0.9}", f"debug.rollouts_{rows}={tmp_path / 'rows'}",
            "log.samples_per_step=32", "checkpoint.interval=4",
        ]  # fmt: skip
        finished(run_job("train", config, *settings))
        found.append((samples_of(tmp_path / name), weights_digest(tmp_path / name, 4)))
    assert found[0] == found[1]
    judged = [sample for sample in found[0][0] if not sample["parts"]]
    assert {sample["reward"] for sample in judged} == {-1.0, -0.25} and all(len(one["turns"]) == 4 for one in judged)
    cut = [sample["reward"] - sample["parts"]["share_of_digits"] for sample in found[0][0] if sample["parts"]]
    assert 0.5 in cut and set(cut) <= {0.0, 0.25, 0.5, 0.75}, "a function's reward is added to the turns'"


@pytest.mark.ranks
@pytest.mark.slow
def test_answers_and_evaluations_take_turns(tmp_path):
    config = inline_config(tmp_path)
    trained = [*settings_of(tmp_path, "run"), "train.max_steps=2"]
    finished(run_job("train", config, *trained))
    held_out = [
        *settings_of(tmp_path, "out"), "model.make=null", f"model.path={tmp_path / 'run'}",
        "data.eval=synthetic://addition?low=0&high=9&count=8&split=test", "eval.num_samples=2",
    ]  # fmt: skip
    # The stop strings and positions are those of the run; a model from a folder has no model.make.
    held_out = [word for word in held_out if not word.startswith(("model.make.", "train.", "checkpoint."))]
    for verb, name in (("eval", "eval/*/eval.jsonl"), ("generate", "generate/*/generated.jsonl")):
        finished(run_job(verb, config, *held_out))
        [path] = (tmp_path / "out").glob(name)
        alone = path.read_text()
        finished(run_job(verb, config, *held_out, ranks=2))
        records = [json.loads(line) for line in alone.splitlines()]
        assert path.read_text() == alone
        assert max(len(record["turns"]) for record in records) > 1
        for record in records:
            assert "".join(turn["response"] + turn["observation"] for turn in record["turns"]) == record["response"]


DOCUMENTED = (ROOT / "docs" / "environments.md").read_text()
EXAMPLES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", DOCUMENTED, re.DOTALL))


@pytest.mark.ranks
def test_the_documented_environment_trains(tmp_path):
    for name in ("dice.py", "dice.yaml"):
        (tmp_path / name).write_text(EXAMPLES[name].replace("dice.py:", f"{tmp_path}/dice.py:"))
    finished(run_job("train", tmp_path / "dice.yaml", f"run.dir={tmp_path / 'run'}"))
    steps = metrics_of(tmp_path / "run")
    assert len(steps) == 2 and all(0 < step["reward"] < 1 and step["environment/turns"] > 1 for step in steps)
    for step in steps:
        ends = {name.rpartition("/")[2]: count for name, count in step.items() if "/ends/" in name}
        assert set(ends) == set(ENDS) and ends["ended"] + ends["length"] == sum(ends.values()) == 32
        assert 0 < step["environment/seconds"] < 5 and 0 < step["environment/open_seconds"] < 5


def tool_call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


FAILING = """
from guessing import Guessing

class Failing(Guessing):
    def reset(self, answer, **row):
        return {"0": len, "1": lambda text: 9 * text, "2": str.upper}[answer](super().reset(answer))
"""
GUESSES = [tool_call("guess", number=1), tool_call("guess", number=2), "So."]
SUMS = [tool_call("add", a=2, b=3), tool_call("add", a="x"), "1"]
FORMS = {
    "tools": ("environment.tools=[FOLDER/sums.py:add]", SUMS, ["tool\n5<", "error"]),
    "factory": ("environment.factory=FOLDER/guessing.py:Guessing", GUESSES, ["higher", " Guess, between"]),
    "mcp": ("environment.mcp=[PYTHON,FOLDER/server.py]", SUMS, ["tool\n5<"]),
    "skyrl": ("environment.skyrl=FOLDER/checking.py:Checking", ["1", "0", "No."], ["Try once more."]),
    "gymnasium": ("environment.gymnasium=FOLDER/stairs.py:Stairs", ["Up: 1", "0", "No."], ["from 0 to 1", "user\n1"]),
    "program": ("environment.program=FOLDER/agent.py:two_tries", ["1", "0", "No."], ["user\n1+", "Try once more."]),
    "verifiers": ("environment.program=FOLDER/sums_v1.py:rollout", ["1", "0", "No."], ["user\n1+"]),
    # Rows without a token: there is no room for an opening, or none at all.
    "failing": ("environment.factory=FOLDER/failing.py:Failing", GUESSES, ["GUESS, BETWEEN"]),
}

NEEDED = {"mcp": ("mcp",), "program": ("aiohttp", "openai"), "verifiers": ("aiohttp", "verifiers")}
"""libraries"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form == "factory" else pytest.mark.slow) for form in FORMS]
)
def test_the_documented_tools_train_on_two_ranks(tmp_path, form, monkeypatch):
    for name in NEEDED.get(form, ()):
        pytest.importorskip(name)
    for name, text in {**EXAMPLES, "failing.py": FAILING}.items():
        (tmp_path / name).write_text(text)
    if form == "verifiers" and shutil.which("uv") is None:
        # What the harness needs is installed.
        (tmp_path / "uv").write_text(f'#!/bin/sh\n[ "$1" != python ] || echo {sys.executable}\n')
        (tmp_path / "uv").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    setting, turns, expected = FORMS[form]
    model, run = make_chat_model(tmp_path / "model", turns), tmp_path / "run"
    finished(
        run_job(
            "train", tmp_path / "sums.yaml", f"run.dir={run}", f"model.path={model}", "environment.tools=[]",
            setting.replace("FOLDER", str(tmp_path)).replace("PYTHON", sys.executable),
            "data.train=synthetic://addition?low=0&high=1&count=4", "reward.max_error_rate=0.9",
            "debug.batch_invariant=true", ranks=2,
        )
    )  # fmt: skip
    steps, samples = metrics_of(run), samples_of(run)
    assert len(steps) == 2 and all(step["mismatch/abs_max"] == 0 for step in steps), "log-probs as they were captured"
    read = "".join(observation for sample in samples for _, observation in sample["turns"])
    assert all(word in read for word in expected)
    if form == "failing":
        assert all(step["environment/ends/crashed"] > 0 and step["environment/ends/length"] > 0 for step in steps)
    else:
        assert all(0 < step["reward"] < 1 and step["grad_norm"] > 0 for step in steps)
        assert form == "verifiers" or all(step["environment/turns"] > 1.2 for step in steps)
        assert all(step["environment/tokens"] > 0 for step in steps)


NUMBERING = """
import os, signal, time
from pathlib import Path
from spmdrl.engines.environment.episode import End, Observation

def count(name):
    path = Path(__file__).with_name(name)
    with open(path, "a") as file:
        file.write("1")
    return path.stat().st_size

class Calls:
    def open(self, row):
        return Row()

class Row:
    num_turns = 0

    def step(self, turn):
        number, self.num_turns = count("answered"), self.num_turns + 1
        if number in KILLS and not os.path.exists(f"{__file__}.{number}"):
            os.truncate(Path(__file__).with_name("answered"), number - 1)
            open(f"{__file__}.{number}", "w").close()
            # Until the rank has read the answers before this one.
            time.sleep(0.5)
            os.kill(int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
            time.sleep(60)
        return End() if self.num_turns == 3 else Observation(str(number % 100))

    def restore(self, turns):
        self.num_turns = len(turns)
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_an_environment_that_counts_its_calls_gives_the_same_rows_after_kills(tmp_path):
    config, found = inline_config(tmp_path), {}
    for name, kills in (("whole", ""), ("killed", "30, 31, 100, 170")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "calls.py").write_text(NUMBERING.replace("KILLS", f"({kills})"))
        settings = [
            f"run.dir={folder / 'run'}", f"environment.function={folder / 'calls.py'}:Calls", *LONG,
            "checkpoint.interval=3",
        ]  # fmt: skip
        for _ in filter(None, kills.split(", ")):
            assert run_job("train", config, *settings).returncode != 0
        finished(run_job("train", config, *settings))
        run = folder / "run"
        found[name] = [untimed(metrics_of(run)), samples_of(run), weights_digest(run, 4), (folder / "answered").stat()]
        assert not any((run / "environment").iterdir()), "the last checkpoint has all rows"
    assert found["killed"][:3] == found["whole"][:3]
    assert found["killed"][3].st_size == found["whole"][3].st_size > 170


IMPURE = """
import json, os, secrets, signal, time
from pathlib import Path
from spmdrl.engines.environment.episode import End, Observation

CALLS, SCRIPT, KILL = (Path(__file__).with_name(name) for name in ("calls", "script", "kill"))

class Clock:
    def open(self, row):
        return Session(row.seed)

class Session:
    def __init__(self, seed):
        self.seed, self.num_turns = seed, 0

    def step(self, turn):
        self.num_turns += 1
        call = f"{self.seed} {self.num_turns}"
        if SCRIPT.exists():
            answer = json.loads(SCRIPT.read_text())[call]
        else:
            with open(CALLS, "a+") as file:
                if KILL.exists():
                    KILL.unlink()
                    time.sleep(0.5)
                    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
                    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
                    time.sleep(60)
                answer = str((time.time_ns() // 1000 + secrets.randbits(20) + CALLS.stat().st_size) % 100)
                file.write(json.dumps([call, answer]) + "\\n")
        return End() if answer.endswith("7") else Observation(answer)

    def restore(self, turns):
        self.num_turns = len(turns)
"""


def killed_at(fault: str, screen: Path, *arguments: str | Path) -> None:
    """Kill a job that hangs at a fault point, once the answers that were under way have come."""
    screen.write_text("")
    words = ["train", *map(str, arguments)]
    job = fork(be_job, environment(**{VARIABLE: fault}), [screen, screen], words, None)
    try:
        while "comes now" not in screen.read_text():
            assert job.exitcode is None, f"{fault} never came: {screen.read_text()}"
            time.sleep(0.02)
        time.sleep(0.5)
    finally:
        end(job, grace_seconds=0.0)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_session_with_a_clock_is_asked_once_wherever_the_job_is_killed(tmp_path):
    config, tool, screen = inline_config(tmp_path), tmp_path / "clock.py", tmp_path / "screen"
    tool.write_text(IMPURE)

    def settings(name: str) -> list[str]:
        own = [f"run.dir={tmp_path / name}", f"environment.function={tool}:Clock", "rollout.prompts_per_step=4"]
        return [*own, *LONG, "log.samples_per_step=16"]

    killed = settings("killed")
    # While rows decode and others wait for their return, in a call, while a checkpoint is saved, and in an update.
    killed_at("generate:0:1:hang:6", screen, config, *killed)
    (tmp_path / "kill").touch()
    assert run_job("train", config, *killed).returncode != 0
    killed_at("checkpoint.rename:0:2:hang", screen, config, *killed)
    killed_at("forward:0:3:hang", screen, config, *killed)
    finished(run_job("train", config, *killed))
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len({call for call, _ in calls}) == len(calls) > 100
    # A job that nothing kills, with a tool that answers what the clock said then.
    (tmp_path / "script").write_text(json.dumps(dict(calls)))
    finished(run_job("train", config, *settings("whole")))
    found = [
        (untimed(metrics_of(run)), samples_of(run), weights_digest(run, 4))
        for run in (tmp_path / "killed", tmp_path / "whole")
    ]
    assert found[0] == found[1] and len(found[0][1]) == 4 * 16


REMEMBERING = """
from spmdrl.engines.environment.episode import End, Observation

class Sums:
    def open(self, row):
        return Sum(row.seed)

class Sum:
    def __init__(self, seed):
        self.seed, self.total = seed, 0

    def step(self, turn):
        self.total += len(turn.response)
        return End() if self.total > 12 else Observation(str((self.seed + self.total) % 100))
"""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "num_equal", "tolerance"),
    [
        # Before the first update, which adds up in another order, bits are the same too.
        pytest.param((), 32, 1e-4, id="sums in any order"),
        pytest.param(
            IN_ONE_ORDER,
            4 * 16,
            0.0,
            id="sums in one order",
            marks=pytest.mark.cpu_only(reason="the batch-invariant operations are a CPU's"),
        ),
    ],
)
def test_two_ranks_hold_the_sessions_of_one(tmp_path, more, num_equal, tolerance):
    config, found = inline_config(tmp_path), []
    (tmp_path / "sums.py").write_text(REMEMBERING)
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        settings = [f"run.dir={run}", f"environment.function={tmp_path / 'sums.py'}:Sums", *LONG, *more]
        finished(run_job("train", config, *settings, "log.samples_per_step=32", ranks=ranks))
        found.append((samples_of(run), load_file(run / "checkpoints/step_000004/model/model.safetensors")))
    (one, weights), (two, of_two) = found
    assert len(one) == (4 * 16 if more else 4 * 32) and max(len(sample["turns"]) for sample in one) > 2
    rows = [[(each["step"], each["row"], each["turns"], each["reward"]) for each in samples] for samples in (one, two)]
    assert rows[0] == rows[1] and one[:num_equal] == two[:num_equal]
    for name, weight in weights.items():
        torch.testing.assert_close(of_two[name], weight, rtol=tolerance, atol=tolerance / 10)


AGENT = """
import json, os, sys, time, urllib.request

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]

def converse(row):
    with open(__file__ + ".starts", "a") as starts:
        starts.write(".")
    messages = [{"role": "system", "content": str(row.seed % 100)}]
    for number in range(3):
        messages += [{"role": "user", "content": f"{number}: {row.prompt}"}]
        messages += [ask(messages)]
        if messages[-1]["content"] == "0":
            break
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    return said.count(row.columns["answer"]) / 4

def compacting(row):
    with open(__file__ + ".starts", "a") as starts:
        starts.write(".")
    messages = [{"role": "user", "content": f"{row.seed % 100}: {row.prompt}"}]
    messages += [ask(messages), {"role": "user", "content": "again"}]
    second = ask(messages)
    third = ask([{"role": "user", "content": "so far: " + second["content"]}])
    return sum(message["content"] == row.columns["answer"] for message in (messages[1], second, third)) / 4

def failing(row):
    if row.seed % 4 == 1:
        ask([{"role": "user", "content": "?"}])
        raise RuntimeError("on purpose")
    if row.seed % 4 == 2:
        time.sleep(600)
    if row.seed % 4 == 3:
        os.fork()
    return converse(row)

if __name__ == "__main__":
    from types import SimpleNamespace
    converse(SimpleNamespace(**json.load(sys.stdin)))
"""


TURNS = ["0", "1", "two"]


def agents(folder: Path, name: str, program: str) -> list[str]:
    """Settings of a run of the program."""
    (folder / "agent.py").write_text(AGENT)
    if not (folder / "model").exists():
        make_chat_model(folder / "model", TURNS)
    return [
        f"run.dir={folder / name}", "model.make=null", f"model.path={folder / 'model'}",
        f"environment.program={program.replace('FILE', str(folder / 'agent.py'))}", "rollout.max_completion_length=200",
        "data.train=synthetic://addition?low=0&high=1&count=4", "log.samples_per_step=32",
    ]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("program", "ranks"),
    [("FILE:converse", 2), pytest.param(f"[{sys.executable}, FILE]", 1, marks=pytest.mark.slow)],
    ids=["function", "command"],
)
def test_a_program_trains_by_what_it_asks_and_is_answered(tmp_path, program, ranks):
    pytest.importorskip("aiohttp")
    config, settings = inline_config(tmp_path), agents(tmp_path, "run", program)
    finished(run_job("train", config, *settings, "train.max_steps=2", ranks=ranks))
    steps, samples = metrics_of(tmp_path / "run"), samples_of(tmp_path / "run")
    assert all(step["grad_norm"] > 0 and step["mismatch/abs_max"] < 1e-4 for step in steps)
    assert all(1 < step["environment/turns"] <= 3 and step["environment/ends/ended"] > 24 for step in steps)
    is_own = program.startswith("FILE")
    for sample in samples:
        said = [response for response, _ in sample["turns"][1:]]
        asked = [observation.partition("user\n")[2].partition("<bos>")[0] for _, observation in sample["turns"][:-1]]
        assert [text.partition("+")[0][:-1] for text in asked] == [f"{number}: " for number in range(len(said))]
        if not (said[-1] == "0" or len(said) == 3):
            assert said[-1] not in TURNS, "it was cut off"
        elif is_own:
            assert sample["reward"] == said.count(sample["answer"]) / 4 and not sample["parts"]
    assert is_own or all(sample["parts"] for sample in samples)


def attentive(folder: Path) -> Path:
    """Let the next token depend on all before it, if only a little."""
    path = folder / "model.safetensors"
    weights, generator = load_file(path), torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith("o_proj.weight"):
            weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    save_file(weights, path, metadata={"format": "pt"})
    return folder


PPO = ["algo={name: ppo, kl_coef: 0.1}", "critic={}", "train.updates_per_step=2", "train.epochs_per_step=2"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("more", "ranks"),
    [([], 2), pytest.param(PPO, 1, marks=pytest.mark.slow),
     pytest.param(["resources.update.tensor=2", "resources.generation.tensor=2"], 2, marks=pytest.mark.slow)],
    ids=["grpo", "ppo", "tensor parallel"],
)  # fmt: skip
def test_a_program_that_compacts_trains_on_what_the_model_read_in_each_conversation(tmp_path, more, ranks):
    pytest.importorskip("aiohttp")
    settings = [*agents(tmp_path, "run", "FILE:compacting"), "environment.on_fork=split", "train.max_steps=2", *more]
    settings += ["rollout.prompts_per_step=4"]
    attentive(tmp_path / "model")
    exact = ["debug.batch_invariant=true"] if not more else []
    finished(run_job("train", inline_config(tmp_path), *settings, *exact, ranks=ranks))
    steps, samples = metrics_of(tmp_path / "run"), samples_of(tmp_path / "run")
    assert all(1.5 < step["environment/pieces"] <= 2 and step["grad_norm"] > 0 for step in steps)
    assert all(step["mismatch/abs_max"] < (1e-4 if more else 1e-30) for step in steps)
    whole = [sample["turns"] for sample in samples if len(sample["turns"]) == 4 and sample["turns"][2][0] in TURNS]
    assert len(whole) > 16, "of 32"
    for _, (_, again), (second, anew), _ in whole:
        assert again == "<bos>user\nagain<bos>assistant\n"
        assert anew == f"<bos>user\nso far: {second}<bos>assistant\n", "nothing of what was before"
    if ranks == 1:
        again = finished(run_job("replay", tmp_path / "run", "--step=2", *[f"--row={row}" for row in range(16)]))
        assert again.stdout.count("the same to the bit as the run recorded") == 16, again.stdout


DROPPING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["resources.generation.tensor=2"]], ids=["replicas", "tensor parallel"])
def test_a_template_without_earlier_thoughts_trains_on_what_it_writes(tmp_path, layout):
    (tmp_path / "checking.py").write_text(EXAMPLES["checking.py"])
    (tmp_path / "sums.yaml").write_text(EXAMPLES["sums.yaml"])
    model, run = attentive(make_chat_model(tmp_path / "model", ["<think>Hm.</think>1", "0"])), tmp_path / "run"
    kept = "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    template = (model / "chat_template.jinja").read_text()
    template = DROPPING + template.replace("{{ m.content }}", kept + "{{ m.content }}")
    (model / "chat_template.jinja").write_text(template)
    finished(
        run_job(
            "train", tmp_path / "sums.yaml", f"run.dir={run}", f"model.path={model}", "environment.tools=[]",
            f"environment.skyrl={tmp_path}/checking.py:Checking", "environment.on_fork=split", *layout,
            "data.train=synthetic://addition?low=0&high=1&count=4", "log.samples_per_step=32",
            *([] if layout else ["debug.batch_invariant=true"]), ranks=2,
        )
    )  # fmt: skip
    steps, samples = metrics_of(run), samples_of(run)
    assert all(step["mismatch/abs_max"] < (1e-4 if layout else 1e-30) for step in steps)
    assert all(1 < step["environment/pieces"] < 2 and step["grad_norm"] > 0 for step in steps)
    reads = {first: read for (first, read), *_ in (sample["turns"] for sample in samples) if read}
    assert reads["0"].count("<bos>user") == 1, "as the template keeps it"
    anew = re.fullmatch(r"<bos>user\n.\+.=<bos>assistant\n1(.*)", reads["<think>Hm.</think>1"], re.DOTALL)
    assert anew and anew[1] == reads["0"], "all of the conversation but the thought"


@pytest.mark.ranks
@pytest.mark.slow
def test_programs_that_fail_and_hang_cost_their_rows_alone(tmp_path):
    pytest.importorskip("aiohttp")
    settings = [*agents(tmp_path, "run", "FILE:failing"), "environment.open_timeout_seconds=5"]
    finished(run_job("train", inline_config(tmp_path), *settings, "train.max_steps=2", "reward.max_error_rate=1"))
    for step in metrics_of(tmp_path / "run"):
        ends = {name: step[f"environment/ends/{name}"] for name in ("crashed", "timed_out", "ended")}
        assert all(0 < number < 20 for number in ends.values()) and sum(ends.values()) == 32, ends
        assert step["grad_norm"] > 0


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_with_programs_that_is_killed_goes_on_to_the_bit(tmp_path):
    pytest.importorskip("aiohttp")
    config, starts, screen = inline_config(tmp_path), tmp_path / "agent.py.starts", tmp_path / "screen"
    long = ["train.max_steps=3", "checkpoint.interval=1", "checkpoint.keep_last=9", "rollout.prompts_per_step=4"]
    long += ["environment.on_fork=split"]
    whole, killed = ([*agents(tmp_path, name, "FILE:compacting"), *long] for name in ("whole", "killed"))
    finished(run_job("train", config, *whole))
    assert len(starts.read_text()) == 1 + 3 * 16, "check begins the first row's"
    killed_at("generate:0:1:hang:1", screen, config, *killed)
    killed_at("forward:0:2:hang", screen, config, *killed)
    starts.unlink()
    finished(run_job("train", config, *killed))
    assert len(starts.read_text()) == 1 + 16, "step 2 has all of its answers"
    found = [
        (untimed(metrics_of(run)), samples_of(run), weights_digest(run, 3))
        for run in (tmp_path / "whole", tmp_path / "killed")
    ]
    assert found[0] == found[1]


@pytest.mark.ranks
@pytest.mark.slow
def test_programs_are_answered_in_evaluations_and_by_generate(tmp_path):
    pytest.importorskip("aiohttp")
    config, settings = inline_config(tmp_path), agents(tmp_path, "out", "FILE:converse")
    settings = [word for word in settings if not word.startswith(("data.train", "log."))]
    settings += ["data.eval=synthetic://addition?low=0&high=1&count=3", "eval.num_samples=2"]
    for verb, name in (("eval", "eval/*/eval.jsonl"), ("generate", "generate/*/generated.jsonl")):
        finished(run_job(verb, config, *settings))
        [path] = (tmp_path / "out").glob(name)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(records) == 6 and max(len(record["turns"]) for record in records) > 2


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("verb", "function", "problem"),
    [("train", "calculato", "did you mean 'calculator'?"),
     ("check", "closed.py:Shop", "can't open a session for the first prompt: ConnectionError: not on Sundays")],
    ids=["built", "opened"],
)  # fmt: skip
def test_an_environment_that_cannot_be_built_or_opened_ends_the_job_with_one_line(tmp_path, verb, function, problem):
    closed = "class Shop:\n    def open(self, row):\n        raise ConnectionError('not on Sundays')\n"
    (tmp_path / "closed.py").write_text(closed)
    function = function.replace("closed.py", str(tmp_path / "closed.py"))
    job = run_job(verb, inline_config(tmp_path), f"run.dir={tmp_path / 'run'}", f"environment.function={function}")
    assert job.returncode == 2 and problem in job.stderr and "Traceback" not in job.stderr
