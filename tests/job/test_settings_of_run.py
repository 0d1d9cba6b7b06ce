"""A run's model is evaluated and asked with the template, stops and environment that the run had."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.config.config import Config, load_config
from spmdrl.config.reader import LoadedConfig, resolved_yaml
from spmdrl.job.run.outcome import MESSAGES
from spmdrl.job.settings_of_run import with_settings_of_run
from spmdrl.observability.summary import write_summary

CHAT = [
    "data={train: a.jsonl, chat_template: always, chat_template_kwargs: {enable_thinking: false}}",
    "data.system_prompt=Add.", "rollout={stop: [END], max_completion_length: 77}", "environment.function=calculator",
    "environment.timeout_seconds=3",
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, with a checkpoint."""
    (tmp_path / "config.resolved.yaml").write_text(resolved_yaml(load_config([], ["model.path=x", *CHAT])))
    (tmp_path / "checkpoints/step_000002/model").mkdir(parents=True)
    return tmp_path


def asked(*arguments: str, verb: str = "generate") -> LoadedConfig[Config]:
    return with_settings_of_run(load_config([], list(arguments)), verb)


@pytest.mark.parametrize("below", ["", "checkpoints/step_000002/model"])
def test_what_is_left_to_defaults_is_taken_and_named_in_one_line(run, below, capsys):
    loaded = asked(f"model.path={run / below}")
    config = loaded.value
    assert (config.data.chat_template, config.data.chat_template_kwargs) == ("always", {"enable_thinking": False})
    assert (config.data.system_prompt, config.rollout.stop) == ("Add.", ("END",))
    assert (config.environment.function, config.environment.timeout_seconds) == ("calculator", 3.0)
    assert (config.rollout.max_completion_length, config.rollout.temperature) == (77, 0.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"config: from {run}: data.chat_template=always,")
    assert f"chat_template: always  # {run}\n" in resolved_yaml(loaded)


def test_what_is_given_stays(run):
    given = ["data.chat_template=never", "rollout.temperature=0.7", "rollout.stop=[]", "environment.function=null"]
    config = asked(f"model.path={run}", *given).value
    assert (config.data.chat_template, config.rollout.temperature, config.rollout.stop) == ("never", 0.7, ())
    assert config.environment.function is None and not config.data.chat_template_kwargs
    assert asked(f"model.path={run}", "data.chat_template_kwargs={}").value.data.chat_template_kwargs == {}


@pytest.mark.parametrize(
    ("are_messages", "used", "given", "expected"),
    [(True, "auto", [], "always"), (False, "auto", [], "auto"), (None, "auto", [], "auto"),
     (True, "never", [], "never"), (True, "auto", ["data.chat_template=auto"], "auto")],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["generate", "eval"])
def test_a_text_goes_into_the_template_where_all_prompts_of_the_run_did(
    tmp_path, verb, are_messages, used, given, expected
):
    config = load_config([], ["model.path=x", "data.train=a.jsonl", f"data.chat_template={used}"])
    (tmp_path / "config.resolved.yaml").write_text(resolved_yaml(config))
    write_summary(tmp_path, **({} if are_messages is None else {MESSAGES: are_messages}))
    assert asked(f"model.path={tmp_path}", *given, verb=verb).value.data.chat_template == expected


def test_several_answers_are_drawn_as_the_runs_evaluations_draw_them(run):
    assert asked(f"model.path={run}", "eval.num_samples=4").value.rollout.temperature == 1.0
    assert asked(f"model.path={run}", verb="eval").value.rollout.temperature == 1.0


def test_a_verb_that_trains_takes_nothing_of_the_run_whose_model_it_starts_from(run):
    assert asked(f"model.path={run}", verb="train").value.data.chat_template == "auto"


def test_a_model_that_is_no_runs_is_asked_as_the_config_has_it(tmp_path, capsys):
    for path in (tmp_path, "owner/name"):
        loaded = load_config([], [f"model.path={path}"])
        assert with_settings_of_run(loaded, "generate") is loaded
    assert capsys.readouterr().err == ""
