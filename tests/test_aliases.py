"""Names of other trainers mean here what they mean there, or are refused with the right key."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.config.aliases import ALIASES
from spmdrl.config.config import Config, load_config
from spmdrl.config.key_schema import schema_keys
from spmdrl.config.reader import ConfigError, LoadedConfig
from spmdrl.config.verb_keys import is_read

BASE = ["model.make={}", "data.train=synthetic://addition?count=10"]


def load(*overrides: str) -> LoadedConfig[Config]:
    return load_config([], [*BASE, *overrides])


def settings(*overrides: str) -> dict[str, object]:
    """What the overrides set, by canonical key."""
    loaded = load(*overrides)
    found: dict[str, object] = {}
    for key, origin in loaded.origin.items():
        if origin == "command line" and not key.startswith(("model.make", "data.train")):
            value: object = loaded.value
            for name in key.split("."):
                value = getattr(value, name)
            found[key] = value
    return found


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["epsilon=0.1"], {"algo.clip_ratio_low": 0.1, "algo.clip_ratio_high": 0.1}),
        (["epsilon=0.1", "epsilon_high=0.3"], {"algo.clip_ratio_low": 0.1, "algo.clip_ratio_high": 0.3}),
        (["algo.clip_ratio_high=0.3", "epsilon=0.1"], {"algo.clip_ratio_low": 0.1, "algo.clip_ratio_high": 0.3}),
        (["epsilon_high=null", "epsilon=0.1"], {"algo.clip_ratio_low": 0.1, "algo.clip_ratio_high": 0.1}),
        (["delta=4", "epsilon_high=0.5"], {"algo.clip_ratio_c": 4.0, "algo.clip_ratio_high": 0.5}),
        (["global_batch_size=1024"], {"rollout.prompts_per_step": 128}),
        (
            ["n_samples_per_prompt=16", "global_batch_size=64", "train.updates_per_step=2"],
            {"rollout.num_generations": 16, "rollout.prompts_per_step": 8, "train.updates_per_step": 2},
        ),
        (["global_batch_size=64", "rollout.prompts_per_step=32"], {"train.updates_per_step": 4}),
        (["num_prompts_per_step=32", "policy.train_global_batch_size=128"], {"train.updates_per_step": 2}),
        (["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16"], {"train.updates_per_step": 4}),
        (["rollout_batch_size=16", "train_batch_size=64"], {"train.updates_per_step": 2}),
        (["algo.name=online_dpo", "beta=0.2"], {"algo.beta": 0.2}),
        (["kl_coef=0.1"], {"algo.kl_coef": 0.1, "algo.kl_in": "reward"}),
        (["kl_loss_type=low_var_kl", "algo.kl_in=loss"], {"algo.kl_estimator": "k3"}),
        (["loss_type=dr_grpo"], {"algo.loss_agg": "seq-mean-token-sum-norm"}),
        (["lr=1e-5", "max_steps=7", "weight_decay=0.1"], {"optim.lr": 1e-5, "train.max_steps": 7}),
        (["num_train_epochs=2"], {"train.epochs": 2.0}),
        (["warmup_ratio=0.1"], {"optim.warmup_ratio": 0.1}),
        (["bf16=true", "gradient_checkpointing=true"], {"model.dtype": "bfloat16"}),
        (
            ["actor_rollout_ref.actor.optim.lr=1e-6", "trainer.save_freq=8"],
            {"optim.lr": 1e-6, "checkpoint.interval": 8},
        ),
        (["data.train_batch_size=64"], {"rollout.prompts_per_step": 64}),
        (["kl_loss_coef=0.1"], {"algo.kl_coef": 0.1, "algo.kl_in": "loss"}),
        (["use_tis=true"], {"algo.rollout_is": "tis"}),
        (["use_tis=true", "tis_imp_ratio_cap=3"], {"algo.rollout_is": "tis", "algo.rollout_is_clip": 3.0}),
        (["tis_imp_ratio_cap=3"], {"algo.rollout_is": "tis", "algo.rollout_is_clip": 3.0}),
        (["tis_imp_ratio_cap=3", "use_tis=false"], {"algo.rollout_is": "none"}),
        (["tis_imp_ratio_cap=-1"], {}),
        (["save_freq=20", "test_freq=-1"], {"checkpoint.interval": 20, "eval.interval": 0}),
        (["save_freq=-1"], {"checkpoint.interval": 0}),
        (["save_steps=20"], {"checkpoint.interval": 20}),
        (["save_steps=20", "train.updates_per_step=4"], {"checkpoint.interval": 5}),
        (["kl_loss_coef=0.1", "kl_coef=0"], {"algo.kl_coef": 0.1, "algo.kl_in": "loss"}),
        (["kl_loss_coef=0.1", "use_kl_loss=false"], {"algo.kl_coef": 0.0}),
        (["adam_beta2=0.95"], {"optim.betas": (0.9, 0.95)}),
        (["eps_clip_low_high=[0.1, 0.3]"], {"algo.clip_ratio_low": 0.1, "algo.clip_ratio_high": 0.3}),
        (["advantage_estimator=group_norm", "dynamic_filtering=true"], {"algo.name": "dapo"}),
        (["resume_mode=disable"], {"resume": "never"}),
        (["enforce_eager=true"], {"rollout.cuda_graphs": False}),
        (["rollout.enforce_eager=false"], {"rollout.cuda_graphs": None}),
        (["param_offload=true"], {"reshard.swap": "always"}),
        (["optimizer_offload=false"], {"reshard.swap": "never"}),
        (["reward_funcs=pkg.mod.fn"], {"reward.functions": ("pkg.mod:fn",)}),
        (["reward_funcs=[math, a/b.py:fn]"], {"reward.functions": ("math", "a/b.py:fn")}),
    ],
)
def test_an_alias_sets_what_it_means_where_it_comes_from(overrides: list[str], expected: dict[str, object]) -> None:
    assert expected.items() <= settings(*overrides).items()
    assert expected or not settings(*overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["global_batch_size=1001"], "1001 samples, .* 8 is no whole number of prompts; set rollout"),
        (["global_batch_size=4"], "no whole number of prompts"),
        (["global_batch_size=many"], "global_batch_size is 'many', but must be a whole number"),
        (["global_batch_size=60", "rollout.prompts_per_step=8"], "60 samples per optimizer step, but a step's 64"),
        (
            ["global_batch_size=64", "rollout.prompts_per_step=8", "train.updates_per_step=3"],
            "by train.updates_per_step if",
        ),
        (
            ["ppo_mini_batch_size=5"],
            "a step's .* prompts must be a multiple of that",
        ),
        (
            ["train_batch_size=64"],
            "samples of an optimizer step in OpenRLHF, and prompts of a step in SkyRL; set global",
        ),
        (["loss_type=sigmoid"], "set algo.loss_agg; losses of pairs are for the verb preferences"),
        (["kl_coef=0.1", "algo.kl_in=loss"], "set algo.kl_coef, or algo.kl_in to reward"),
        (["delta=1.1"], r"above 1 \+ algo.clip_ratio_high = 1.2"),
        (["kl_loss_coef=0.1", "algo.kl_in=reward"], "set algo.kl_coef, or algo.kl_in to loss"),
        (["use_tis=2"], "use_tis is 2, but must be true or false"),
        (["save_steps=0.1"], "save_steps is 0.1, but checkpoint.interval counts steps"),
        (["save_steps=20", "train.updates_per_step=3"], "set checkpoint.interval, which counts steps"),
        (["kl_loss_coef=0.1", "kl_coef=0.1"], "kl_coef is a KL term in the reward, but algo.kl_in is loss"),
        (["kl_loss_coef=0.1", "algo.kl_coef=0.2"], "kl_loss_coef sets algo.kl_coef, which is given under another name"),
        (["resume_mode=resume_path"], "set resume to its folder or step"),
        (["reward_funcs=[accuracy_reward]"], "TRL's accuracy_reward; set reward.functions"),
    ],
)
def test_an_alias_that_cannot_be_kept_is_refused_with_the_right_key(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        load(*overrides)
    assert "\n" not in str(refusal.value)


def test_what_an_alias_is_read_as_is_said_once_with_its_values() -> None:
    used = load("epsilon=0.1", "global_batch_size=64", "beta=0.2").aliases_used
    assert used == {
        "epsilon": "algo.clip_ratio_low=0.1, algo.clip_ratio_high=0.1",
        "global_batch_size": "rollout.prompts_per_step=8",
        "beta": "algo.kl_coef=0.2",
    }


def test_a_later_source_wins_over_an_alias_and_an_alias_over_an_earlier_one(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("global_batch_size: 64\nrollout: {num_generations: 4}\n")
    second.write_text("rollout: {num_generations: 16}\nalgo: {clip_ratio_high: 0.3}\n")
    assert load_config([first], BASE).value.rollout.prompts_per_step == 16
    assert load_config([first, second], BASE).value.rollout.prompts_per_step == 4
    assert load_config([second, first], BASE).value.rollout.prompts_per_step == 16
    first.write_text("epsilon_high: 0.5\n")
    assert vars(load_config([first, second], BASE).value.algo)["clip_ratio_high"] == 0.3
    assert vars(load_config([second, first], BASE).value.algo)["clip_ratio_high"] == 0.5


VALUES = (
    *("8", "0.3", "true", "false", "x", "token", "grpo", "sigmoid", "k3", "auto", "group", "[8]", "[math]", "[q_proj]"),
    *(
        "{}",
        "vllm",
        "val:accuracy",
        "math",
        "[console]",
        "[0.1, 0.2]",
        "x.py",
        "constant",
        "token-mean",
        "bfloat16",
        "adamw",
    ),
)
# Counts of one process, and what may stand only beside another count.
NEVER_ALONE = {
    *("train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    "generation_batch_size",
}


@pytest.mark.parametrize(
    "verb",
    [
        *("train", "sft"),
        *(
            pytest.param(verb, marks=pytest.mark.slow)
            for verb in ("preferences", "reward-model", "eval", "generate", "replay")
        ),
    ],
)
def test_each_alias_given_alone_sets_keys_that_the_verb_reads_or_is_refused(verb: str) -> None:
    taken = set()
    for name, alias in ALIASES.items():
        base = [] if alias.key == "model.path" else ["model.make={}"]
        for value in VALUES:
            if (name, value) == ("optim", "{}"):
                # The section itself.
                continue
            try:
                loaded = load_config([], [*base, f"{name}={value}"], verb)
            except ConfigError as refused:
                assert name in str(refused) or alias.key in str(refused), refused
                continue
            given = {key for key, origin in loaded.origin.items() if origin == "command line"}
            assert name in loaded.aliases_used and all(is_read(verb, key) for key in given)
            taken.add(name)
            break
    left = set(ALIASES) - taken - NEVER_ALONE
    assert not [name for name in left if is_read(verb, ALIASES[name].key)]


def test_each_alias_names_a_key_and_is_none() -> None:
    keys = set(schema_keys(Config))
    assert {alias.key for alias in ALIASES.values()} <= keys
    # Text in place of this section is the optimizer's name in other trainers.
    assert keys & set(ALIASES) == {"optim"}
