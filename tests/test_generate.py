"""`generate` answers prompts from the command line, standard input or a data file, and refuses to answer nothing."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from spmdrl.cli.command_line import main, take_prompts
from spmdrl.config.reader import ConfigError
from tests.support.jobs import finished, run_job

MODEL = ["model.make={hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, "
"intermediate_size: 64, max_position_embeddings: 32}"]  # fmt: skip


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_prompts_are_taken_from_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, "12+30=\nor é\n".encode())
    arguments = ["a.yaml", "prompt=a=b", "seed=1", "--prompt", "--c", "-", "--prompt=d"]
    assert take_prompts(arguments) == (["a=b", "--c", "12+30=\nor é", "d"], ["a.yaml", "seed=1"])


@pytest.mark.parametrize(
    ("content", "words"), [(b"\n", "prompt is empty"), (b"\xff", "isn't UTF-8"), (b"x" * (2 << 20), "more than 1 MiB")]
)
def test_standard_input_that_is_no_prompt_is_refused(
    monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    standard_input(monkeypatch, content)
    with pytest.raises(ConfigError, match=words):
        take_prompts(["-"])


def test_standard_input_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="only one rank could read"):
        take_prompts(["-"])


def test_nothing_to_answer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *MODEL]) == 2
    assert "set data.eval to a data file, or write prompt='...'" in capsys.readouterr().err
    assert main(["generate", *MODEL, "prompt="]) == 2
    assert "prompt is empty" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_prompt_of_the_command_line_is_answered_on_the_screen_and_leaves_no_file(tmp_path: Path) -> None:
    # Data rows that are no prompts, and more tokens than the model has positions: neither is in the way.
    settings = [*MODEL, f"run.dir={tmp_path}", "data.eval=nowhere.jsonl", "rollout.ignore_eos=true"]
    done = finished(run_job("generate", *settings, "prompt=12+30=", "prompt=1+1=", "eval.num_samples=2", ranks=2))
    lines = [line for line in done.stdout.splitlines() if line.startswith((">", "["))]
    assert [line[:7].rstrip() for line in lines if line.startswith(">")] == ["> 12+30", "> 1+1="]
    assert [line[:3] for line in lines] == ["> 1", "[1]", "[2]", "> 1", "[1]", "[2]"]
    assert "(cut at rollout.max_completion_length or the model's last position)" in lines[1]
    assert {path.name for path in tmp_path.iterdir()} == {"initial_model"}
    # The same prompts in a file are answered with the same texts.
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt": "12+30="}, {"prompt": "1+1="}]))
    done = finished(run_job("generate", *settings, f"data.eval={path}", "eval.num_samples=2"))
    [path] = tmp_path.glob("generate/*/generated.jsonl")
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(answers) == 4 and answers[0]["finish"] == "length"
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] == answers


@pytest.mark.parametrize(
    ("use", "prompt"), [("always", "1+1"), ("auto", [{"role": "user", "content": "1+1"}])], ids=["texts", "messages"]
)
def test_a_runs_model_answers_as_the_runs_evaluation_did(tmp_path: Path, use: str, prompt: object) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}= {% endfor %}")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    settings = [
        *MODEL, f"data={{train: {data}, eval: {data}, chat_template: {use}}}", "data.system_prompt=0",
        f"data.chat_template_file={tmp_path / 'mine.jinja'}", "reward.functions=[exact]", "train.max_steps=1",
        "rollout={prompts_per_step: 1, num_generations: 2, max_completion_length: 5}", f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    finished(run_job("train", *settings))
    evaluated = json.loads((tmp_path / "run/eval/step_000001.jsonl").read_text())
    assert evaluated["prompt"] == "0= 1+1= "
    (tmp_path / "mine.jinja").unlink()
    done = finished(run_job("generate", f"model.path={tmp_path / 'run'}", "prompt=1+1"))
    assert "data.chat_template=always" in done.stderr and "data.system_prompt='0'" in done.stderr
    answer = done.stdout.partition("> 1+1\n")[2].rstrip("\n").partition(" ... (cut")[0]
    assert answer == evaluated["response"], done.stdout
    page = finished(run_job("check", "generate", f"model.path={tmp_path / 'run'}", "prompt=1+1")).stdout
    assert "    0= 1+1=\n" in page and f"data.chat_template: always  # {tmp_path / 'run'}\n" in page
