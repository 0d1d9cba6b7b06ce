"""Supervised training: what it learns of conversations, and which rows it refuses before it begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.engines.training.checkpoints.file_writes import written_at_once
from spmdrl.job.objectives import AnswerWatch
from spmdrl.nouns.settings.model_config import MakeConfig
from tests.support.jobs import finished, metrics_of, run_job, untimed, weights_digest

CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %};"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CONVERSATIONS = [
    ["1+1=", "2", "and 2+2?", "4"],
    ["3+4=", "7", "one more", "8", "2 less", "6"],
    ["what is it", "it's 12"],
    ["0+1=", "1"],
]
EVERY_TURN = ["sft.turns=all", "sft.rows_per_step=4", "sft.optim.lr=1e-2", "checkpoint.interval=2"]


def conversation(contents: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The settings of a chat model, and conversations of one to three turns."""
    folder = tmp_path_factory.mktemp("chats")
    model, data = folder / "model", folder / "rows.jsonl"
    make_model_folder(model, MakeConfig(hidden_size=16, num_hidden_layers=1, max_position_embeddings=128), seed=0)
    (model / "chat_template.jinja").write_text(CHAT)
    data.write_text("".join(json.dumps({"messages": conversation(one)}) + "\n" for one in CONVERSATIONS))
    return [f"model.path={model}", f"data.train={data}"]


def loss_of_transformers(model_folder: str) -> float:
    """The mean of -log p over the tokens of all answers, of each conversation by itself, ends of turns included."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = (kind.from_pretrained(model_folder) for kind in (AutoTokenizer, AutoModelForCausalLM))
    logprobs: list[torch.Tensor] = []
    for contents in CONVERSATIONS:
        ids, is_answer = [], []
        for message in conversation(contents):
            is_own = message["role"] == "assistant"
            parts = [(f"{message['role']}: ", False), (message["content"] + "<eos>" * is_own, is_own), (";", False)]
            for text, mark in parts:
                new = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids, is_answer = ids + new, is_answer + [mark] * len(new)
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        logprobs += [logprobs_TV[place - 1, ids[place]] for place in range(len(ids)) if is_answer[place]]
    return -float(torch.stack(logprobs).mean())


@pytest.mark.ranks
def test_every_turn_of_packed_conversations_is_learnt_as_by_itself_on_any_ranks_and_after_a_restart(chats, tmp_path):
    run = tmp_path / "run"
    both = [*chats, *EVERY_TURN, "sft.max_steps=4", f"run.dir={run}"]
    finished(run_job("sft", *both, ranks=2))
    steps, digest = untimed(metrics_of(run)), weights_digest(run, 4)
    assert steps[0]["loss"] == pytest.approx(loss_of_transformers(chats[0].partition("=")[2]), rel=1e-5)
    assert steps[-1]["loss"] < steps[0]["loss"]

    finished(run_job("sft", *chats, *EVERY_TURN, "sft.max_steps=2", f"run.dir={tmp_path / 'alone'}"))
    for alone, together in zip(metrics_of(tmp_path / "alone"), steps, strict=False):
        assert alone["loss"] == pytest.approx(together["loss"], rel=1e-5)

    shutil.rmtree(run / "checkpoints/step_000004")
    assert "resumed from" in finished(run_job("sft", *both, ranks=2)).stdout
    assert weights_digest(run, 4) == digest and untimed(metrics_of(run)) == steps


def test_a_run_is_not_gone_on_with_on_other_completions(chats, tmp_path):
    data = tmp_path / "rows.jsonl"
    settings = [chats[0], f"data.train={data}", "sft.rows_per_step=1", "sft.max_steps=1", f"run.dir={tmp_path / 'run'}"]
    for completion, code in (("2", 0), ("two", 2)):
        data.write_text(json.dumps({"prompt": "1+1=", "completion": completion}))
        job = run_job("sft", *settings)
        assert job.returncode == code, job.stdout + job.stderr
    assert "belongs to another run: rows of data.train was" in job.stderr


def test_a_conversation_whose_answers_are_ambiguous_is_named(chats, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(chats[0].partition("=")[2], model)
    forgets = CHAT.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")
    (model / "chat_template.jinja").write_text(forgets)
    job = run_job("sft", f"model.path={model}", chats[1], *EVERY_TURN, "sft.max_steps=1", f"run.dir={tmp_path / 'run'}")
    assert job.returncode == 2 and job.stderr.count("spmdrl: ") == 1 and "Traceback" not in job.stderr
    assert "rows.jsonl:1: it can't be learnt: the chat template writes messages[3] or what precedes it" in job.stderr


def test_the_probability_that_ends_a_training_is_averaged_over_steps_before_a_restart_too(tmp_path: Path):
    found = [0.2, 0.9, 0.9, 0.5, 0.9, 0.9]
    whole = AnswerWatch(0.75, is_main=True)
    expected = [whole.is_enough(probability) for probability in found]
    assert expected == [False] * 4 + [True] * 2
    for after in range(len(found)):
        before, resumed = AnswerWatch(0.75, is_main=True), AnswerWatch(0.75, is_main=False)
        first = [before.is_enough(probability) for probability in found[:after]]
        written_at_once(before, tmp_path)
        resumed.read_from(tmp_path)
        assert first + [resumed.is_enough(probability) for probability in found[after:]] == expected


@pytest.mark.parametrize(("column", "place"), [("answer", "rows.jsonl:2: its answer"), ("prompt", "rows.jsonl:2")])
def test_rows_with_tokens_that_the_model_has_no_embedding_for_are_named(tmp_path, column, place):
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    make_model_folder(
        model, MakeConfig(hidden_size=16, num_hidden_layers=1, max_position_embeddings=32, chars="0123456789+="), seed=0
    )
    tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens.add_special_tokens(["<think>"])
    tokens.save(str(model / "tokenizer.json"))
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"} | {column: "<think>4"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.path={model}", f"data.train={data}", "sft.max_steps=2", f"run.dir={tmp_path / 'run'}"]
    job = run_job("sft", *settings, timeout=120)
    assert job.returncode == 2, job.stdout + job.stderr
    assert place in job.stderr and "token 16 ('<think>'), but the model's vocabulary ends at 15" in job.stderr
    assert "Traceback" not in job.stderr and job.stderr.count("spmdrl: ") == 1
