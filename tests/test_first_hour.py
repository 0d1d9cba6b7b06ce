"""The first hour of a new user: README's commands and usual mistakes, typed on a terminal, each screen looked at."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path

import pytest

from tests.support.terminal import Screen, typed

# A quiet machine shows something every 5 seconds; a machine that runs other tests beside this one is given longer.
MOST_SILENCE_SECONDS = float(os.environ.get("SPMDRL_MOST_SILENCE", 30))
QUICKSTART = "configs/debug/quickstart.yaml"
SHORT = (
    "sft.max_steps=12", "sft.rows_per_step=64", "rollout.prompts_per_step=8", "train.max_steps=3", "eval.max_rows=16",
)  # fmt: skip
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
SUMS = [(f"{a}+{b}=", str(a + b)) for a in range(10, 14) for b in range(20, 24)]


def read(screen: Screen) -> Screen:
    """The screen, if it would not make a new user wonder whether anything happens."""
    assert screen.longest_silence < MOST_SILENCE_SECONDS, f"{screen.command}: {screen.longest_silence:.1f}s of silence"
    assert not [line for line in screen.lines if "Warning" in line], screen.text
    return screen


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart, shortened, on one rank."""
    folder = tmp_path_factory.mktemp("first") / "run"
    screen = read(typed("spmdrl", "train", QUICKSTART, *SHORT, f"run.dir={folder}"))
    named = ("998k parameters", "float32", "cpu", "native", str(folder), "sft step 12/12", "grpo step 3/3", "done")
    for expected in named:
        assert expected in screen.text, f"{expected} isn't on the screen:\n{screen.text}"
    return folder


@pytest.fixture
def model(first_run: Path) -> Path:
    return first_run / "checkpoints" / "step_000003" / "model"


@pytest.mark.slow
def test_the_quickstart_on_two_ranks_ends_with_what_it_learnt(tmp_path: Path) -> None:
    fewer = ("sft.max_steps=2", "train.max_steps=1")
    screen = read(typed(*TORCHRUN, "spmdrl", "train", QUICKSTART, *SHORT, *fewer, f"run.dir={tmp_path / 'run'}"))
    assert "2 x cpu" in screen.text or "2 ranks" in screen.text, screen.text
    assert f"{tmp_path / 'run' / 'report.html'}" in screen.text


@pytest.mark.slow
def test_an_own_model_own_data_and_an_own_reward(model: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{p}", "answer": "{a}"}}\n' for p, a in SUMS))
    (tmp_path / "rewards.py").write_text(
        "def close(completions, answer, **columns):\n"
        "    return [float(text[:1] == right[:1]) for text, right in zip(completions, answer)]\n"
    )
    (tmp_path / "run.yaml").write_text(
        f"run: {{name: my_run}}\nmodel: {{path: {model}}}\ndata: {{train: train.jsonl, eval: train.jsonl}}\n"
        "reward: {functions: [number, rewards.py:close]}\n"
        "rollout: {prompts_per_step: 4, num_generations: 4, max_completion_length: 6}\ntrain: {max_steps: 2}\n"
    )
    checked = read(typed("spmdrl", "check", "run.yaml", cwd=tmp_path))
    assert "epoch" in checked.text and "parameters" in checked.text, checked.text
    assert "shard 8" in read(typed("spmdrl", "check", "run.yaml", "--ranks", "8", cwd=tmp_path, forked=True)).text
    trained = read(typed("spmdrl", "train", "run.yaml", cwd=tmp_path, forked=True))
    assert "done" in trained.text and "grpo step 2/2" in trained.text
    assert (tmp_path / "runs" / "my_run" / "report.html").is_file()


def files_of_every_format(folder: Path) -> list[Path]:
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in SUMS]
    alpaca = [{"instruction": prompt, "input": "", "output": answer} for prompt, answer in SUMS]
    turns = [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": a}]} for p, a in SUMS]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps([{"problem": p, "solution": a, "answer": a} for p, a in SUMS]))
    with gzip.open(folder / "rows.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    with open(folder / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer"), *SUMS])
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    (folder / "messages.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in turns))
    (folder / "pairs.jsonl").write_text("".join(f'{{"prompt": "{p}", "completion": "{a}"}}\n' for p, a in SUMS))
    return sorted(folder.iterdir())


@pytest.mark.slow
def test_own_data_in_each_format_is_learnt_from(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    files = files_of_every_format(data)
    screen = read(
        typed(
            "spmdrl", "sft", f"model.path={model}", f"data.train=[{','.join(map(str, files))}]", "sft.max_steps=2",
            "sft.rows_per_step=16", "data.chat_template=never", f"run.dir={tmp_path / 'run'}",
        )
    )  # fmt: skip
    assert "sft step 2/2" in screen.text and "reward" not in screen.text, screen.text


def test_a_trained_model_is_evaluated_and_its_runs_summary_stays(first_run: Path, model: Path) -> None:
    before = (first_run / "summary.json").read_text()
    screen = read(typed("spmdrl", "eval", QUICKSTART, f"model.path={model}", "model.make=null", "eval.max_rows=16",
                        f"run.dir={first_run}"))  # fmt: skip
    assert "accuracy" in screen.text and "mean reward" in screen.text, screen.text
    assert (first_run / "summary.json").read_text() == before


@pytest.mark.slow
def test_prompts_are_answered_from_the_command_line_and_from_stdin(first_run: Path, tmp_path: Path) -> None:
    named = read(typed("spmdrl", "generate", f"model.path={first_run}", "prompt=12+30=", cwd=tmp_path))
    assert "12+30=" in named.text
    from_stdin = ("spmdrl", "generate", f"model.path={first_run}", "-")
    piped = read(typed(*from_stdin, answer="11+22=\n", cwd=tmp_path, forked=True))
    assert "11+22=" in piped.text


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = ("spmdrl", "train", QUICKSTART, *SHORT, "checkpoint.interval=1", "train.max_steps=40", "eval.interval=0",
               f"run.dir={tmp_path / 'run'}")  # fmt: skip
    stopped = typed(*command, interrupt_at="grpo step 3/40", code=130, forked=True)
    assert len([line for line in stopped.lines if "interrupted" in line]) == 1, stopped.text
    again = read(typed(*command, "train.max_steps=6", code=None, forked=True))
    assert "resumed from" in again.text, again.text


MISTAKES = [
    (["trian", QUICKSTART], "did you mean train?"),
    (["train"], "spmdrl init quickstart"),
    (["train", "configs/debug/quikstart.yaml"], "quickstart.yaml"),
    (["train", QUICKSTART, "algo.name=ppo"], "set critic={}"),
    (["train", QUICKSTART, "resources.device=cuda"], "cuda"),
    (["train", QUICKSTART, "data.train=nowhere.jsonl"], "nowhere.jsonl"),
    (["train", QUICKSTART, "reward.functions=[nowhere.py:fn]"], "nowhere.py"),
    (["eval", "model.path=nowhere/at_all", QUICKSTART, "model.make=null"], "nowhere/at_all"),
    (["generate", "model.path=runs/none", "prompt=12+30="], "runs/none"),
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", QUICKSTART, "model.pth=x"], "did you mean model.path"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MISTAKES),
    ],
)
def test_a_mistake_is_answered_in_a_few_lines_with_a_way_out(arguments: list[str], expected: str) -> None:
    screen = read(typed("spmdrl", *arguments, code=2, forked=True))
    assert expected in screen.text and len(screen.lines) <= 4, screen.text


@pytest.mark.slow
def test_keys_and_verbs_explain_themselves(first_run: Path) -> None:
    assert "learning rate" in read(typed("spmdrl", "help", "optim.lr")).text.lower()
    assert "train" in read(typed("spmdrl", "train", "--help")).text
    assert "report.html" in read(typed("spmdrl", "report", first_run)).text
