"""Names that aren't here are answered with what to do instead, and hints are near what was written."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.cli.command_line import VERBS
from spmdrl.config.aliases import ADVICE, ALIASES
from spmdrl.config.config import Config, load_config
from spmdrl.config.key_names import KnownNames, spellings_of
from spmdrl.config.key_schema import schema_keys
from spmdrl.config.reader import ConfigError
from spmdrl.observability.terminal.spelling import edit_distance, nearest

BASE = ["model.make={}", "data.train=synthetic://addition?count=10"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([], [*BASE, *overrides])
    return str(caught.value)


def test_a_name_with_advice_is_answered_and_is_no_key() -> None:
    keys, spellings = list(schema_keys(Config)), spellings_of(ALIASES)
    names = KnownNames(keys, spellings, ADVICE)
    for name, answer in ADVICE.items():
        assert name not in spellings and name not in keys
        assert "\n" not in answer
        if "=" in name:
            assert name.partition("=")[0] in keys
        else:
            assert names.advice(name) == answer or any(key.endswith(f".{name}") for key in keys)


def test_every_key_that_advice_names_exists() -> None:
    keys = set(schema_keys(Config))
    sections = {key for key in keys if "." not in key}
    for answer in ADVICE.values():
        named = re.findall(r"\b[a-z_]+\.[a-z_.]*[a-z_]\b", answer.replace("run.yaml", ""))
        unknown = {name for name in named if name.partition(".")[0] in sections} - keys
        assert not unknown, answer


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--dry-run"], "command line: there is no --dry_run; `spmdrl check` with the same files"),
        (["--dry-run", "seed=1"], "command line: there is no --dry_run; `spmdrl check` with the same files"),
        (["--per-device-train-batch-size", "8"], "per_device_train_batch_size counts rows of one process; set rollout"),
        (["lora.dropout=0.1"], "unknown key lora.dropout"),
        (["checkpoint.save_best=true"], "unknown key checkpoint.save_best (= true); set checkpoint.best to a metric"),
        (["algo.name=gae"], "algo.name is 'gae', but must be "),
        (["algo.name=gae"], "; it is named ppo; critic.gamma and critic.lam"),
        (["algo.name=GSPO"], "; did you mean gspo?"),
        (["algo.name=DrGRPO"], "; did you mean dr_grpo?"),
        (["algo.filter_groups={enable: true}"], "algo.name=dapo leaves out prompts whose responses are all right"),
        (["train.lr=1"], "did you mean optim.lr?"),
        (["hf-checkpoint=models/a"], "unknown key hf-checkpoint (= 'models/a'); did you mean model.path?"),
        (["temprature=1"], "did you mean"),
        (["actor_rollout_ref.ref.rollout.n=8"], "did you mean rollout.num_generations?"),
        (["rollout.name=sglang"], "set rollout.engine to native or vllm"),
        (["data.truncation=left"], "data.on_bad_row=skip leaves out"),
        (["algo.name=kto"], "there is no KTO; `spmdrl preferences`"),
        (["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"], "and resources.update.tensor for training"),
        (["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"], "; set resources.update.pipeline"),
        (["reward_model.reward_manager=dapo"], "; set reward.functions"),
        (["peft_config=lora"], "; set lora={} for adapters"),
        (["data.image_key=images"], "; images aren't read"),
    ],
)
def test_what_users_of_other_trainers_type_is_answered(overrides: list[str], expected: str) -> None:
    assert expected in refusal(*overrides)


@pytest.mark.parametrize("key", ["checkpoint.zebra", "zebra", "algo.quasar", "rollout.frequency"])
def test_a_name_far_from_every_key_gets_no_hint(key: str) -> None:
    message = refusal(f"{key}=1")
    assert "did you mean" not in message and "; the keys of " in message


def test_a_flag_with_dashes_is_a_key_and_a_file_is_no_value() -> None:
    assert load_config([], [*BASE, "--learning-rate", "1e-3"]).value.optim.lr == 1e-3
    assert load_config([], [*BASE, "--optim.lr", "1e-3"]).value.optim.lr == 1e-3


@pytest.mark.parametrize(
    ("word", "expected"),
    [("trian", "train"), ("evaluate", "eval"), ("training", "train"), ("chek", "check"), ("xyz", None)],
)
def test_the_nearest_name_is_near(word: str, expected: str | None) -> None:
    assert nearest(word, VERBS) == expected


WORDS = st.text("abc_", max_size=6)


@given(WORDS, WORDS, WORDS)
def test_the_distance_of_words_is_a_distance(a: str, b: str, c: str) -> None:
    assert edit_distance(a, a) == 0
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) <= max(len(a), len(b))
    if len(c) >= 2:
        assert edit_distance(a + c, a + c[1] + c[0] + c[2:]) <= 1
