"""The screen of `spmdrl check`: the verdict first, one row as it is read, and whether the run fits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.support.chat_model import TEMPLATE
from tests.support.jobs import ROOT, run_job, tiny_config

from spmdrl.cli.command_line import take_question
from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.job.start.prepared import check_room, prepare_without_weights
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.roles import POLICY
from spmdrl.verbs.check import data_warnings, row_lines

MAKE = (
    "model.make={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 64}"
)


def written(folder: Path, **columns: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", **columns}) + "\n" for n in range(4)))
    return path


def lines_of(verb: str, *overrides: str) -> list[str]:
    checked = check_run(load_config([], [MAKE, *overrides]), verb)
    prepared = prepare_without_weights(checked)
    return [*data_warnings(checked, prepared), *row_lines(checked, prepared)]


def test_a_file_of_four_keys_fits_a_screen_with_the_verdict_first(tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"model: {{make: {{}}}}\ndata: {{train: {written(tmp_path, answer='2', level=3)}}}\n"
        f"reward: {{functions: [exact]}}\nrun: {{dir: {tmp_path / 'run'}}}\n"
    )
    screen = run_job("check", tmp_path / "run.yaml").stdout
    lines = screen.splitlines()
    assert lines[0].startswith("would start: yes | train | 1 rank | 100 steps = 800 epochs of 4 rows")
    # Where this machine keeps its temporary files takes no line of the screen.
    shown = [line.replace(str(tmp_path), "/home/me/addition") for line in lines]
    assert sum(-(-len(line) // 80) for line in shown) <= 45, screen
    assert "NOTE   columns that nothing reads: level" in lines
    assert "    0+1=" in lines and "answer: 2" in lines and "columns for exact: answer" in lines
    assert f"    run.dir: {tmp_path / 'run'}  # {tmp_path / 'run.yaml'}:4" in lines
    assert "# default" not in screen and "defaults; --all prints them" in screen


def test_the_whole_config_is_yaml_beneath_comments(tmp_path):
    done = run_job("check", tiny_config(tmp_path), "--all", "--ranks", "2", "--device-memory", "1GiB")
    tree = yaml.safe_load(done.stdout)
    assert tree["train"]["max_steps"] == 3 and len(tree) > 10
    assert "# default" in done.stdout and "# ok     memory: at least" in done.stdout


def test_a_run_that_does_not_fit_a_named_device_or_this_host_fails(tmp_path):
    config = tiny_config(tmp_path)
    large = "model.make={hidden_size: 131072, num_hidden_layers: 8, intermediate_size: 524288, num_attention_heads: 64}"
    done = run_job("check", config, large, "--ranks", "2", "--device-memory=80GiB")
    assert done.returncode == 1 and done.stdout.startswith("would start: no: 1 problem")
    assert "FAILED memory: at least" in done.stdout and "of 80 GiB, a device; use more ranks" in done.stdout
    done = run_job("check", config, large, f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 1 and done.stdout.startswith("would start: no: 2 problems"), done.stdout
    assert "FAILED memory:" in done.stdout and "FAILED disk:" in done.stdout
    done = run_job("check", config, "--ranks", "2", "--device-memory", "much")
    assert done.returncode == 2 and "--device-memory is 'much'" in done.stderr


def test_the_words_of_check_are_taken_from_those_of_the_config():
    question, rest = take_question(["sft", "run.yaml", "--device-memory=80GiB", "--all", "lora={}"])
    assert (question["device_gib"], question["verb"], question["is_whole"]) == (80, "sft", True)
    assert rest == ["run.yaml", "lora={}"]


def test_rewards_are_looked_at_for_verbs_that_have_them():
    with pytest.raises(ConfigError, match="--reward looks at the rewards of train and eval, not at sft"):
        take_question(["sft", "run.yaml", "--reward"])


def test_each_verbs_row_is_shown_as_that_verb_reads_it(tmp_path):
    never = "data.chat_template=never"
    pairs = f"data.train={written(tmp_path, chosen='2', rejected='3')}"
    assert {"    0+1=", "chosen: 2<eos>", "rejected: 3<eos>"} <= set(
        lines_of("preferences", pairs, "preferences.max_steps=1", never)
    )
    answers = f"data.train={written(tmp_path, completion='1 and 1')}"
    assert "learnt: 1 and 1<eos>" in lines_of("sft", answers, "sft.max_steps=1", never)


def test_characters_without_tokens_are_counted_with_an_example(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1 + 1 = ☃é☃", "answer": "2"}) + "\n")
    warned, *_ = lines_of("train", f"data.train={path}", "reward.functions=[exact]")
    assert warned == "the tokenizer has no tokens for 2 characters of the prompts, such as 'é☃'"


def test_held_out_prompts_that_are_trained_on_are_counted_with_an_example(tmp_path):
    held_out = tmp_path / "test.jsonl"
    words = [f"data.train={written(tmp_path, answer='2')}", f"data.eval={held_out}", "reward.functions=[exact]"]

    def warnings_of(*numbers: int) -> list[str]:
        held_out.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "2"}) + "\n" for n in numbers))
        return [line for line in lines_of("train", *words) if "data.eval" in line]

    assert warnings_of(4, 5) == warnings_of(3, 3) == []
    (line,) = warnings_of(9, 3, 8, 0, 7)
    assert line.startswith("2 of the 5 prompts of data.eval are also in data.train, the first is '3+1='; ")


def test_a_long_prompt_loses_its_middle(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "begin\n" + "x\n" * 50 + "end", "answer": "2"}) + "\n")
    lines = lines_of("train", f"data.train={path}", "reward.functions=[exact]")
    assert "    begin" in lines and "    end" in lines and len(lines) < 15


def test_tools_are_named_and_turns_that_the_template_rewrites_warned_of_or_refused(tmp_path):
    template = tmp_path / "mine.jinja"
    last = "{% if m.role == 'assistant' and loop.last %}So: {% endif %}{{ m.content }}"
    template.write_text(TEMPLATE.replace("{{ m.content }}", last))
    words = [
        f"data.train={written(tmp_path, answer='2')}", "reward.functions=[exact]", "environment.isolation=inline",
        f"data.chat_template_file={template}", "data.chat_template=always",
        f"environment.tools=[{ROOT}/tests/engines/environment/trl_forms.py:multiply]",
    ]  # fmt: skip
    lines = lines_of("train", *words)
    assert "tools of environment.tools: multiply" in lines
    (without, _) = (line for line in lines if "otherwise once a tool's message follows" in line)
    assert f"{template} writes a turn without a thought" in without
    assert re.search(r"assistant\\nSo: <tool_call>.* becomes '.*assistant\\n<tool_call>", without)
    with pytest.raises(ValueError, match="environment.on_fork is refuse, and the chat template .* without a thought"):
        lines_of("train", *words, "environment.on_fork=refuse")
    split = lines_of("train", *words, "environment.on_fork=split")
    assert split == [line for line in lines if "otherwise once" not in line], "rows have what the template writes"
    template.write_text(TEMPLATE)
    assert lines_of("train", *words, "environment.on_fork=refuse")


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("algo.name=online_dpo", "algo.name is online_dpo, which compares whole rows"),
        ("reward.model={path: any}", "there is a reward.model, which rates whole rows"),
        ("rollout.partial_max_rounds=2", "rollout.partial_max_rounds is 2, and a later step goes on with whole rows"),
        ("algo={name: opd}", "teacher.prompt_column is the prompt of whole rows"),
    ],
)
def test_what_needs_whole_rows_is_refused_where_conversations_are_split(tmp_path, setting, problem):
    words = [
        f"data.train={written(tmp_path, answer='2', hint='?')}", "reward.functions=[exact]",
        f"environment.tools=[{ROOT}/tests/engines/environment/trl_forms.py:multiply]", setting,
        *(["teacher.prompt_column=hint"] if "opd" in setting else []),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=f"on_fork is split, .* but {problem}; set environment.on_fork to keep, or"):
        check_run(load_config([], [MAKE, *words, "environment.on_fork=split"]), "train")


def test_room_for_random_weights_and_checkpoints_is_looked_for_together(tmp_path):
    words = [MAKE, f"data.train={written(tmp_path, answer='2')}", "reward.functions=[exact]", f"run.dir={tmp_path}/run"]
    checked = check_run(load_config([], words), "train")
    decoder = prepare_without_weights(checked).source.decoder
    before = check_room(checked, {POLICY: decoder}, "cpu")
    (tmp_path / "run" / "initial_model").mkdir(parents=True)
    after = check_room(checked, {POLICY: decoder}, "cpu")
    assert 0 < after < before
    large = "model.make={hidden_size: 65536, num_hidden_layers: 400, intermediate_size: 262144}"
    done = run_job("train", *words, large, f"run.dir={tmp_path}/other")
    assert done.returncode == 2 and "bytes of random weights (model.make)" in done.stderr, done.stderr
    assert not (tmp_path / "other" / "initial_model").exists()


def test_what_the_steps_with_rewards_can_not_do_is_refused_before_the_supervised_ones(tmp_path):
    run = tmp_path / "run"
    done = run_job(
        "train", tiny_config(tmp_path), "sft.max_steps=2", "rollout.max_completion_length=64", f"run.dir={run}"
    )
    assert done.returncode == 2 and "32 positions" in done.stderr, done.stderr
    assert not run.exists()
