"""Each verb reads its own keys, and refuses or names the others: none is ignored in silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spmdrl.config.config import Config, load_config
from spmdrl.config.key_schema import schema, schema_keys
from spmdrl.config.reader import ConfigError
from spmdrl.config.verb_keys import OWN, STEPS, counterpart, is_read

ROOT = Path(__file__).parents[1]
VERBS = ("train", "sft", "preferences", "reward-model", "eval", "generate", "replay")
BASE = ["model.make={}", "seed=1"]
LEAVES = tuple(dict.fromkeys(key.name for key in schema(Config) if not key.sections))
OF_STEPS = [key for keys in STEPS.values() for key in keys]
# A list of lists is a value of no key.
WRONG = "[[wrong]]"


def refusal(verb: str, *overrides: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(files, [*BASE, *overrides], verb)
    return str(caught.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text("model: {make: {}}\ndata: {eval: x.jsonl, train: x.jsonl}\n" + text)
    return path


@pytest.mark.parametrize("verb", VERBS)
def test_each_key_given_alone_is_one_that_the_verb_reads_or_refuses(verb: str) -> None:
    # A verb's steps are given alone: with them, a command line may serve several verbs.
    keys = [key for key in LEAVES if key not in ("model.make", "seed", "algo.name", *OF_STEPS)]
    # Fewer at a time than a refusal shows, and of several sections, each of which refuses but one key.
    apart = [keys[start :: len(keys) // 8] for start in range(len(keys) // 8)]
    for some in [*apart, *([key] for key in OF_STEPS)]:
        message = refusal(verb, *(f"{key}={WRONG}" for key in some))
        for key in some:
            assert (f"command line: {key} isn't read by {verb}; " in message) != is_read(verb, key), key
            # Of those that are read, the value is refused.
            assert re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", message), key


@pytest.mark.parametrize("verb", VERBS)
def test_the_key_that_a_refusal_names_is_read(verb: str) -> None:
    keys = schema_keys(Config)
    for key in (key for key in LEAVES if not is_read(verb, key)):
        other = counterpart(verb, key, keys)
        assert other is None or is_read(verb, other) and other in keys and other != key


@pytest.mark.parametrize(
    ("verb", "given", "instead"),
    [
        ("sft", "optim.lr=1e-3", "set sft.optim.lr"),
        ("preferences", "optim.max_grad_norm=2", "set preferences.optim.max_grad_norm"),
        ("reward-model", "train.max_steps=3", "set reward_model.max_steps"),
        ("preferences", "rollout.prompts_per_step=3", "set preferences.rows_per_step"),
        ("preferences", "algo.kl_coef=0.5", "set preferences.beta"),
        ("sft", "preferences.optim.lr=1", "set sft.optim.lr"),
        ("train", "preferences.optim.lr=1", "set optim.lr"),
        ("train", "reward_model.max_steps=1", "set train.max_steps"),
        ("train", "preferences.rows_per_step=1", "set rollout.prompts_per_step"),
        ("eval", "rollout.temperature=0.5", "set eval.temperature"),
        ("eval", "rollout.num_generations=4", "set eval.num_samples"),
        ("generate", "eval.temperature=0.5", "set rollout.temperature"),
        ("generate", "optim.lr=0.5", "leave it out"),
    ],
)
def test_a_key_of_another_verb_is_refused_with_the_one_that_is_read(verb: str, given: str, instead: str) -> None:
    assert refusal(verb, "data.eval=x", given) == f"command line: {given.split('=')[0]} isn't read by {verb}; {instead}"


def test_a_file_with_keys_of_no_verb_whose_steps_it_has_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "optim: {lr: 1e-3}\npreferences: {max_steps: 3}\n")
    assert refusal("preferences", files=(path,)) == (
        f"{path}:3: optim.lr isn't read by preferences; set preferences.optim.lr; a file that train uses too has "
        "train.max_steps"
    )
    assert refusal("train", files=(written(tmp_path, "reward_model: {centring: 0.1}\n"),)).endswith(
        "leave it out; a file that reward-model uses too has reward_model.max_steps"
    )


def test_a_file_that_several_verbs_share_is_read_and_what_isnt_read_is_named(tmp_path: Path) -> None:
    text = (
        "optim: {lr: 1e-3}\ntrain: {max_steps: 9, max_skipped_in_a_row: 5}\n"
        "sft: {max_steps: 3}\nrollout: {top_p: 0.5}\n"
    )
    path = written(tmp_path, text)
    assert load_config([path], [], "sft").unread == ["optim", "train.max_steps", "rollout"]
    assert load_config([path], [], "train").unread == []
    assert load_config([path], [], "eval").unread == ["data.train", "optim", "train", "sft", "rollout"]


def test_a_command_line_is_for_several_verbs_where_it_has_the_steps_of_both() -> None:
    line = ["data.train=x", "optim.lr=1e-3", "rollout.top_p=0.5", "sft={max_steps: 3, optim: {lr: 0.01}}"]
    assert load_config([], [*BASE, *line, "train.max_steps=1"], "sft").unread == ["optim", "rollout", "train"]
    for lacking in ([line[0], line[1], line[3]], [*line[:3], "train.max_steps=1"]):
        assert "command line: optim.lr isn't read by sft; set sft.optim.lr" in refusal("sft", *lacking)


def test_answering_verbs_take_the_file_of_any_run_but_no_such_key_of_the_command_line(tmp_path: Path) -> None:
    path = written(tmp_path, "optim: {lr: 1e-3}\npreferences: {beta: 0.2}\n")
    assert load_config([path], [], "generate").unread == ["data.train", "optim", "preferences"]
    assert "command line: optim.lr isn't read by generate" in refusal("generate", "optim.lr=1", files=(path,))


def test_a_misspelt_key_is_unknown_rather_than_unread() -> None:
    assert "unknown key optim.lrr" in refusal("sft", "data.train=x", "optim.lrr=1")
    assert "rollout.engine_kwargs.x isn't read by preferences" in refusal("preferences", "rollout.engine_kwargs.x=1")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_of_this_repository_are_read_by_the_verbs_whose_steps_they_have(path: Path) -> None:
    before = [ROOT / "configs" / "debug" / "quickstart.yaml"] if path.parent.name == "algorithms" else []
    for verb in ("train", *OWN):
        load_config([*before, path], ["data={train: x, eval: x}", "model={path: null, make: {}}"], verb)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("sft.optim.lr=1e30", "sft.optim.lr is 1e30, but must be >= 0 and <= 10; the default is 1.0e-05"),
        ("sft.optim.lr=fast", "sft.optim.lr is 'fast', but must be a number >= 0 and <= 10; write one such as 1.0e-05"),
        ("run.dir=/", "run.dir is /, a file system's root, a home or a clone"),
        (f"run.dir={Path.home()}", "a file system's root, a home or a clone"),
    ],
)
def test_values_that_cant_be_meant_are_refused(given: str, refused: str) -> None:
    assert refused in refusal("sft", "data.train=x", given)


def test_a_clone_is_no_runs_folder(tmp_path: Path) -> None:
    (tmp_path / ".git").touch()
    assert f"such as {tmp_path / 'runs' / 'a'}" in refusal("sft", "data.train=x", f"run.dir={tmp_path}", "run.name=a")
