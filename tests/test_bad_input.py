"""Bad input ends a job with one clear message, a code that isn't 0, and no process left."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spmdrl.cli import command_line
from spmdrl.job.start import prepared
from spmdrl.resources import world
from tests.support.jobs import run_job, tiny_config

REFUSED = [
    pytest.param(["algo.kl_coeff=0.1"], ["algo.kl_coeff", "algo.kl_coef", "command line"], id="unknown key"),
    pytest.param(["train.max_steps=many"], ["train.max_steps", "many"], id="wrong type"),
    pytest.param(["data.train=nowhere.jsonl"], ["nowhere.jsonl"], id="missing file"),
    pytest.param(["model.make=null", "model.path=nowhere"], ["model.path", "nowhere"], id="missing model"),
    pytest.param(["resources.update.data=3"], ["resources.update.data 3", "1 ranks"], id="layout"),
    pytest.param(["resources.update.shard=4"], ["4 ranks", "the job has 1"], id="layout of more ranks"),
    pytest.param(["reward.functions=[nowhere.py:fn]"], ["nowhere.py"], id="missing reward"),
    pytest.param(["rollout.num_generations=1"], ["rollout.num_generations is 1"], id="group of one"),
    pytest.param(["rollout.max_completion_length=64"], ["max_completion_length", "32 positions"], id="too long"),
    pytest.param(["data.max_prompt_length=2"], ["has 4 tokens", "data.max_prompt_length is 2"], id="long prompts"),
    pytest.param(["resources.device=npu"], ["resources.device is 'npu'"], id="device"),
    pytest.param(["rollout.engine=vllm"], ["rollout.engine is vllm, which isn't installed"], id="engine"),
    pytest.param(["log.backends=[wandb]"], ["log.backends names wandb", "take it out"], id="wandb"),
    pytest.param(["log.backends=[tensorboard]"], ["log.backends names tensorboard"], id="tensorboard"),
    pytest.param(["reward.functions=[LEVEL]"], ["by_level needs the columns level", "answer"], id="reward column"),
    pytest.param(
        ["model.make=null", "model.path=nobody/no-such-model"], ["nobody/no-such-model", "the hub"], id="hub name"
    ),
    pytest.param(
        ["data.eval=EVAL", "data.max_prompt_length=64", "rollout.max_completion_length=20"],
        [
            "the longest prompt of data.eval has 30 tokens",
            "prompt: 1, the first is ",
            "/eval.jsonl:1; ",
            "data.max_prompt_length=12 and data.on_bad_row=skip",
        ],
        id="long held-out prompts",
    ),  # fmt: skip
]
NEEDS = {"engine": "vllm", "wandb": "wandb", "tensorboard": "tensorboard"}


@pytest.mark.parametrize(("overrides", "words"), REFUSED)
def test_bad_settings_end_with_one_message_and_check_has_the_same(tmp_path, request, monkeypatch, overrides, words):
    extra = NEEDS.get(request.node.callspec.id)
    if extra and importlib.util.find_spec(extra) is not None:
        pytest.skip(f"{extra} is installed")
    (tmp_path / "level.py").write_text("def by_level(completions, level): return [0.0] * len(completions)\n")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "1+" * 14 + "1="}) + "\n")
    # The hub isn't asked by tests, and answers no stranger's name in any case.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = {"LEVEL": f"{tmp_path}/level.py:by_level", "EVAL": f"{tmp_path}/eval.jsonl"}
    for name, path in files.items():
        overrides = [override.replace(name, path) for override in overrides]
    arguments = [tiny_config(tmp_path), f"run.dir={tmp_path / 'run'}", *overrides]
    trained, checked = (run_job(verb, *arguments, timeout=60) for verb in ("train", "check"))
    assert_refused(trained, words)
    assert_refused(checked, words)
    assert refusal_of(trained) == refusal_of(checked)


def refusal_of(job):
    return job.stderr[job.stderr.index("spmdrl: ") :]


def assert_refused(job, words):
    assert job.returncode == 2, job.stdout + job.stderr
    assert "Traceback" not in job.stderr
    for word in words:
        assert word in job.stderr, job.stderr
    assert job.stderr.count("spmdrl: ") == 1, job.stderr


def test_rows_without_an_answer_are_named_by_file_and_line(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n{"prompt": "1+3=", "answer": ""}\n')
    job = run_job("train", tiny_config(tmp_path), f"data.train={data}", "reward.functions=[exact]", timeout=60)
    assert_refused(job, [f"{data}:2", f"{data}:3", "no answer"])


REWARDS = {
    "raises": "def fn(completions, **columns):\n    raise KeyError('no such column')\n",
    "hangs": "import time\n\ndef fn(completions, **columns):\n    time.sleep(1000)\n",
    "dies": "import os\n\ndef fn(completions, **columns):\n    os._exit(3)\n",
    "nonsense": "def fn(completions, **columns):\n    return ['good'] * len(completions)\n",
}
REASONS = {
    "raises": "no such column",
    "hangs": "reward.timeout_seconds = 1.0",
    "dies": "lost in this call",
    "nonsense": "a str",
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind", ["raises", "dies", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("hangs", "nonsense"))]
)
def test_a_broken_reward_function_stops_all_ranks_with_its_reason(tmp_path, kind):
    reward = tmp_path / f"{kind}.py"
    reward.write_text(REWARDS[kind])
    mark = f"run.dir={tmp_path / 'run'}"
    overrides = [mark, f"reward.functions=[{reward}:fn]", "reward.timeout_seconds=1"]
    job = run_job("train", tiny_config(tmp_path), *overrides, ranks=2, timeout=90)
    assert job.returncode != 0
    assert "reward.max_error_rate" in job.stderr and REASONS[kind] in job.stderr, job.stderr
    assert job.stderr.count("spmdrl: the reward failed") == 1, job.stderr
    assert processes_with(str(reward)) == []


def test_a_reward_that_lacks_its_variable_ends_the_evaluation_after_some_rows_and_names_the_users_line(tmp_path):
    reward = tmp_path / "judge.py"
    reward.write_text("import os\n\ndef fn(completions, **columns):\n    os.environ['A_KEY']\n")
    overrides = [f"run.dir={tmp_path / 'run'}", f"reward.functions=[{reward}:fn]", "rollout.max_completion_length=20"]
    held_out = ["data.eval=synthetic://addition?low=0&high=9&count=60", "eval.num_samples=20"]
    job = run_job("train", tiny_config(tmp_path), *overrides, *held_out, "eval.before_train=true", timeout=90)
    assert_refused(job, ["failed on all of the first rows", f"({reward}:4 in fn)", "pass it with reward.variables"])


def processes_with(word: str) -> list[str]:
    """Command lines that name `word`, once processes on their way out had a moment to go."""
    deadline = time.monotonic() + 5
    while found := [line for line in command_lines() if word in line]:
        if time.monotonic() > deadline:
            return found
        time.sleep(0.1)
    return []


def command_lines() -> list[str]:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return lines


@pytest.mark.ranks
def test_a_reward_that_can_not_be_loaded_is_tried_and_refused_by_one_rank(tmp_path):
    reward, loads = tmp_path / "broken.py", tmp_path / "loads"
    reward.write_text(f"print('load', file=open({str(loads)!r}, 'a'))\nraise RuntimeError('no licence')\n")
    settings = [f"run.dir={tmp_path / 'run'}", f"reward.functions=[{reward}:fn]"]
    job = run_job("train", tiny_config(tmp_path), *settings, ranks=2, timeout=60)
    assert_refused(job, ["can't be loaded: RuntimeError: no licence", f"({reward}:2 in <module>)"])
    assert loads.read_text() == "load\n"


def be_late(rank: int) -> None:
    """Start one rank after another one's patience, here a second, is over."""
    command_line.OTHER_RANKS_WAIT_SECONDS = world._REFUSAL_SECONDS = 1.0
    if os.environ.get("RANK") == str(rank):
        time.sleep(3)


UNFIT = (
    "resources.update.data=3",
    "resources.update.data 3 does not divide the job's 2 ranks; set it to one of [1, 2]",
)
UNKNOWN = ("optim.rl=1", "optim.rl")


@pytest.mark.ranks
@pytest.mark.parametrize("late", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("setting", "words"), [UNFIT, UNKNOWN])
def test_what_all_ranks_find_wrong_is_shown_once_however_late_one_of_them_is(tmp_path, setting, words, late):
    run = [tiny_config(tmp_path), setting, f"run.dir={tmp_path / 'run'}"]
    job = run_job("train", *run, ranks=2, timeout=60, prepare=partial(be_late, late))
    assert job.returncode == 2
    assert job.stderr.count("spmdrl: ") == 1 and job.stderr.count(words) == 1, job.stderr


def be_late_once_met() -> None:
    """Have rank 0 find last what all ranks find wrong about model and data."""
    if os.environ.get("RANK") == "0":
        check = prepared.check_model_fits

        def check_late(*arguments: Any) -> None:
            time.sleep(4)
            check(*arguments)

        prepared.check_model_fits = check_late


@pytest.mark.ranks
@pytest.mark.slow
def test_what_all_ranks_find_wrong_after_they_have_met_is_shown_once_too(tmp_path):
    run = [tiny_config(tmp_path), "data.max_prompt_length=2", f"run.dir={tmp_path / 'run'}"]
    job = run_job("train", *run, ranks=2, timeout=60, prepare=be_late_once_met)
    assert job.returncode == 2
    assert job.stderr.count("spmdrl: ") == 1 and "data.max_prompt_length is 2" in job.stderr, job.stderr


def test_a_checkpoint_folder_of_another_run_is_refused(tmp_path):
    config, folder = tiny_config(tmp_path), tmp_path / "run"
    assert run_job("train", config, f"run.dir={folder}", "train.max_steps=1").returncode == 0
    job = run_job("train", config, f"run.dir={folder}", "seed=7", timeout=60)
    assert_refused(job, ["seed was 0 and is 7", "resume=never"])
    job = run_job("train", config, f"run.dir={folder}", "seed=7", "resume=never", "train.max_steps=1", timeout=60)
    assert job.returncode == 0, job.stderr
    assert (tmp_path / "run.1" / "checkpoints").is_dir()


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    config, folder = tiny_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", "checkpoint.interval=1"]
    assert run_job("train", config, *settings, "train.max_steps=2").returncode == 0
    weights = folder / "checkpoints" / "step_000002" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    job = run_job("train", config, *settings, "train.max_steps=3")
    assert job.returncode == 0, job.stderr
    assert "model.safetensors was changed" in job.stdout and "step_000001 after step 1" in job.stdout
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
