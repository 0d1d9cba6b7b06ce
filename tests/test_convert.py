"""Configurations of other trainers become ones that are checked, and train; each key's fate is printed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from spmdrl.cli.command_line import main
from spmdrl.config.aliases import ALIASES, DEFAULTS, MARKS, NEEDLESS, OWN_NAMES
from spmdrl.config.coming_from import pages
from spmdrl.config.config import Config, load_config
from spmdrl.config.foreign_file import read_elsewhere, read_words, words_of_script
from spmdrl.config.given import leaves
from spmdrl.config.key_names import spellings_of
from spmdrl.config.reader import ConfigError
from spmdrl.config.translation import Translation, programs_of, trainer_of, translate, verb_of

FOLDER = Path(__file__).parent / "elsewhere"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".toml", ".yaml"))
VERBS = {"trl_dpo": "preferences", "openrlhf_dpo": "preferences", "nemo_dpo": "preferences", "trl_sft": "sft",
         "verl_sft": "sft"}  # fmt: skip


def converted(path: Path, to: Path, *words: str) -> dict[str, object]:
    """Convert by the command, and return what it wrote, by dotted keys."""
    assert main(["convert", str(path), "--to", str(to), "--ranks", "8", *words]) == 0
    return flat(to.read_text())


def flat(text: str) -> dict[str, object]:
    found: dict[str, object] = {}

    def walk(value: object, key: str) -> None:
        if isinstance(value, dict) and value:
            for name, entry in value.items():
                walk(entry, f"{key}.{name}".lstrip("."))
        else:
            found[key] = value

    walk(yaml.safe_load(text), "")
    return found


def translated(path: Path) -> Translation:
    problems: list[str] = []
    written = read_elsewhere(path, problems)
    assert problems == []
    names, words = [name for name, _ in written], [path.name, path.read_text()]
    trainer = trainer_of(names, words)
    assert trainer is not None
    return translate(Config, written, trainer, VERBS.get(path.stem, "train"), 8)


def test_most_keys_of_public_configurations_have_a_place_here() -> None:
    counts: Counter[str] = Counter()
    for path in FILES:
        own = translated(path).counts()
        assert own["taken"] + own["converted"] >= 0.5 * own.total(), path.name
        assert own["no counterpart"] <= 0.3 * own.total(), path.name
        counts += own
    assert counts["taken"] + counts["converted"] >= 0.6 * counts.total(), counts
    assert len(FILES) == 14


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_written_is_read_by_its_verb(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verb = VERBS.get(path.stem, "train")
    written = converted(path, tmp_path / "run.yaml")
    shown = capsys.readouterr().out
    assert f"for spmdrl {verb} on 8 ranks" in shown and "left to set" not in shown
    loaded = load_config([tmp_path / "run.yaml"], [], verb)
    assert not loaded.unread and not loaded.aliases_used
    # The model is in all of them.
    assert written["model.path"]
    assert main(["convert", str(path), "--to", str(tmp_path / "run.yaml")]) == 2
    assert "exists; move it away" in capsys.readouterr().err
    assert main(["convert", str(path), "--to", str(tmp_path / "missing" / "run.yaml")]) == 2
    assert "run.yaml isn't written: No such file or directory; write elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            # 8 rows x 8 ranks x 8 passes are 512 samples, of which each optimizer step has 8 x 8 x 2.
            "trl_gspo.sh",
            {"rollout.prompts_per_step": 64, "train.updates_per_step": 4, "algo.ratio_level": "sequence",
             "lora.targets": ["q_proj", "v_proj"], "optim.schedule": "linear", "algo.clip_ratio_high": 4e-4},
        ),
        ("trl_dpo.sh", {"preferences.rows_per_step": 128, "preferences.optim.lr": 5e-6, "lora.rank": 32}),
        ("trl_sft.sh", {"sft.rows_per_step": 128, "sft.optim.lr": 2e-4, "train.activation_checkpointing": "full"}),
        (
            "verl_grpo.sh",
            {"rollout.prompts_per_step": 1024, "train.updates_per_step": 4, "algo.kl_coef": 0.001, "algo.kl_in": "loss",
             "resources.generation.tensor": 2, "optim.weight_decay": 0.01, "reshard.swap": "never", "algo.name": "grpo",
             "train.max_tokens_per_microbatch": 24576, "log.backends": ["console", "jsonl", "wandb"]},
        ),
        # The KL term is in the reward, where verl has it only if it is switched on.
        ("verl_ppo.sh", {"algo.name": "ppo", "algo.kl_coef": 0.0, "critic.path": "Qwen/Qwen2.5-Math-PRM-7B"}),
        (
            "openrlhf_dapo.sh",
            {"algo.name": "dapo", "algo.clip_ratio_low": 0.2, "algo.clip_ratio_high": 0.27, "algo.kl_in": "loss",
             "train.updates_per_step": 8, "rollout.cuda_graphs": False, "algo.rollout_is": "tis",
             "reward.functions": ["/rewards/reward_func.py:reward_func"], "checkpoint.interval": 20},
        ),
        ("openrlhf_dpo.sh", {"preferences.rows_per_step": 256, "preferences.beta": 0.1, "resume": "auto"}),
        (
            "prime_rl_hendrycks.toml",
            {"rollout.prompts_per_step": 64, "rollout.max_completion_length": 8192 - 512, "train.max_steps": 5000,
             "eval.num_samples": 32,
             "data.train": "hub://mikasenghaas/Sanity-Test-R1D-1.5B?config=default"},
        ),
        (
            "slime_qwen.sh",
            {"rollout.prompts_per_step": 32, "rollout.temperature": 0.8, "algo.kl_coef": 0.0,
             "optim.betas": [0.9, 0.98], "data.eval": ["/data/gsm8k/test.parquet"],
             "model.path": "/models/Qwen2.5-0.5B-Instruct",
             "resources.generation.tensor": 2, "debug.deterministic": True},
        ),
        (
            "nemo_grpo.yaml",
            {"rollout.prompts_per_step": 32, "train.updates_per_step": 1, "optim.warmup_steps": 50, "seed": 42,
             "checkpoint.keep_best": 3, "checkpoint.best": "eval/accuracy", "rollout.max_completion_length": 512},
        ),
        (
            "nemo_dpo.yaml",
            {"preferences.beta": 0.05, "preferences.rows_per_step": 128, "preferences.max_steps": 150,
             "preferences.optim.betas": [0.9, 0.98], "preferences.optim.warmup_steps": 20, "checkpoint.keep_last": 3},
        ),
        ("hf_common.yaml", {"algo.clip_ratio_c": 4.0, "lora.targets": [], "rollout.engine": "vllm", "seed": 7}),
    ],
)  # fmt: skip
def test_each_setting_means_here_what_it_means_there(
    name: str, expected: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = converted(FOLDER / name, tmp_path / "run.yaml")
    assert {key: written.get(key) for key in expected} == expected
    capsys.readouterr()


def test_a_name_without_a_place_is_listed_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted(FOLDER / "trl_sft.sh", tmp_path / "run.yaml")
    shown = capsys.readouterr().out
    assert "push_to_hub=true: a checkpoint's model/ is a Hugging Face folder" in shown.partition("no counterpart:")[2]
    assert "packing=true: rows are always packed" in shown.partition("nothing to set:")[2]
    assert "lr_scheduler_type=linear (TRL's default): sft.optim.schedule=linear" in shown


def test_a_command_line_is_read_as_it_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "run.yaml"
    words = ["trl", "grpo", "--model_name_or_path=m", "--num-generations", "4", "--no_log_completions", "--use_peft"]
    assert main(["convert", "--to", str(to), "--", *words]) == 0
    assert {"model.path": "m", "rollout.num_generations": 4, "lora": {}}.items() <= flat(to.read_text()).items()
    assert "TRL's settings" in capsys.readouterr().out


VERL = "PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m"
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --pretrain OpenRLHF/Llama-3-8b-sft-mixture --prompt_data a.jsonl"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # Its reward manager is no reward model, GRPO has no critic, and its rate changes once per step of 16 updates.
        (
            f"{VERL} algorithm.adv_estimator=grpo reward_model.reward_manager=dapo trainer.critic_warmup=0 "
            "critic.optim.lr=1e-5 data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=32 "
            "actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.rollout.top_k=-1 "
            "actor_rollout_ref.rollout.val_kwargs.n=4 actor_rollout_ref.actor.clip_ratio=0.2 "
            "actor_rollout_ref.actor.clip_ratio_low=0.1",
            {"train.updates_per_step": 16, "optim.warmup_steps": 160, "rollout.top_k": 0, "eval.num_samples": 4,
             "algo.clip_ratio_low": 0.1, "algo.clip_ratio_high": 0.2, "algo.clip_ratio_c": 3.0, "train.epochs": 30,
             "critic.warmup_steps": None, "critic.optim.lr": None, "optim.weight_decay": 0.01},
        ),
        (
            f"{VERL} algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True "
            "algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_penalty=low_var_kl",
            {"algo.name": "reinforce_pp", "algo.kl_in": "advantage", "algo.kl_estimator": "k3", "algo.kl_coef": 0.01},
        ),
        (
            f"{VERL} algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01",
            {"algo.name": "ppo", "algo.kl_in": "reward", "algo.kl_estimator": "k1"},
        ),
        # What follows an option is no program: the model isn't for SFT.
        (
            f"{OPENRLHF} --advantage_estimator rloo",
            {"algo.name": "rloo", "algo.kl_in": "advantage", "algo.kl_estimator": "k1", "algo.ratio_level": "token",
             "algo.loss_agg": "token-mean", "train.epochs": 1, "optim.betas": [0.9, 0.95]},
        ),
        (f"{OPENRLHF} --advantage_estimator gae --init_kl_coef 0.1", {"algo.kl_in": "reward", "algo.kl_coef": 0.1}),
        (
            f"{OPENRLHF} --advantage_estimator dr_grpo --use_kl_loss --kl_estimator k3",
            {"algo.loss_agg": "token-mean", "algo.kl_in": "loss", "algo.kl_estimator": "k3"},
        ),
        (
            "python3 train.py --hf-checkpoint m --rollout-batch-size 32",
            {"algo.loss_agg": "seq-mean-token-mean", "rollout.num_generations": 1},
        ),
        ("trl rloo --model_name_or_path m", {"algo.name": "rloo"}),
        (
            "trl grpo --model_name_or_path m --scale_rewards false --max_steps -1",
            {"algo.scale_rewards": "none", "train.max_steps": None, "train.epochs": 3},
        ),
        (
            "trl dpo --model_name_or_path m --loss_type ipo",
            {"preferences.loss_type": "ipo", "preferences.length_normalized": True},
        ),
        ("trl dpo --model_name_or_path m --loss_type hinge", {"preferences.loss_type": "hinge"}),
        ("trl reward --model_name_or_path m", {"reward_model.rows_per_step": 8}),
    ],
)  # fmt: skip
def test_what_a_command_leaves_out_or_names_otherwise_is_as_there(
    words: str, expected: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "--to", str(tmp_path / "run.yaml"), "--", *words.split()]) == 0
    written = flat((tmp_path / "run.yaml").read_text())
    assert {key: written.get(key) for key in expected} == expected, capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "convert takes one file"),
        (["--", "trl", "kto", "--learning_rate", "1e-6"], "trl kto has no counterpart; spmdrl has TRL's grpo"),
        (["a.yaml", "b.yaml"], "convert takes one file"),
        (["missing.yaml"], "the file can't be read"),
        (["--", "echo"], "no settings found"),
        (["--", "--colour", "red"], "whose settings these are isn't plain; write --from"),
        (["--from", "verl", "--verb", "eval", "--", "--colour", "red"], "--verb is eval, but must be one of train"),
    ],
)
def test_what_can_not_be_converted_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


SCRIPT = """
#!/bin/bash
LR=${LR:-1e-6}
export RANKS="8"
size=
if [ -n "$1" ]; then
    size=${size:-2}
    LR=5
    EXTRA+=(data.x=1)
else
    size=${size:-4}
fi
if [ -z "$2" ]; then HOSTS=1; fi
for host in a b; do ssh $host --port 22; done
ARGS=(--lr ${LR}  # the rate
    --name "a b"
)
CUDA_VISIBLE_DEVICES=0 HYDRA_FULL_ERROR=1 python train.py "${ARGS[@]}" model.tp=$size \\
    --ranks $RANKS --unknown $NOWHERE
"""


def test_words_of_a_script_have_its_variables_and_no_branch() -> None:
    found = dict(read_words(words_of_script(SCRIPT), "x.sh"))
    assert {name: given.plain for name, given in found.items()} == {
        "lr": 1e-6, "name": "a b", "model.tp": 2, "ranks": 8, "unknown": "$NOWHERE"
    }  # fmt: skip


def test_references_and_sections_that_are_off_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "top: {size: 4, same: '${.size}'}\nother: {size: '${top.same}', off: {enabled: false, lr: 1}}\n"
        "steps: ['${top.size}']\nmany: [{name: a, kwargs: {lr: 2}}]\n"
    )
    found = {name: given.plain for name, given in read_elsewhere(path, [])}
    assert found == {
        "top.size": 4, "top.same": 4, "other.size": 4, "other.off.enabled": False, "steps": ["${top.size}"],
        "many.name": "a", "many.kwargs.lr": 2,
    }  # fmt: skip


def test_trainers_and_verbs_are_known_by_names_and_words() -> None:
    assert trainer_of(["actor_rollout_ref.model.path"], []) == "verl"
    assert trainer_of(["lr"], ["openrlhf.cli.train_ppo_ray"]) == "OpenRLHF"
    assert trainer_of(["lr"], []) is None
    assert verb_of([], ["trl/scripts/dpo.py"]) == "preferences"
    assert verb_of(["sft.max_num_steps"], []) == "sft"
    assert verb_of([], ["openrlhf.cli.train_rm"]) == "reward-model"
    assert verb_of(["grpo.seed"], ["grpo.yaml"]) == "train"
    # The name of a file counts last, and a section of verl's for rewards not at all.
    assert verb_of(["reward_model.enable"], ["verl.trainer.main_ppo", "run_qwen2-7b_rm.sh"]) == "train"
    assert programs_of(["accelerate", "launch", "--config_file", "a.yaml", "sft.py", "--model", "b-dpo"]) == [
        "sft.py", "accelerate", "launch",
    ]  # fmt: skip
    assert programs_of(["CUDA_VISIBLE_DEVICES=0", "trl", "dpo", "--beta", "0.1"]) == ["trl", "dpo"]
    # Folders on the way to a program don't count.
    assert verb_of([], ["/work/rl/nemo_rl/examples/run_sft.py"]) == "sft"


def test_a_script_is_known_by_its_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, to = tmp_path / "run_rm.sh", tmp_path / "run.yaml"
    script.write_text("pip install --upgrade trl\nHF_HUB_OFFLINE=1 trl rloo --model_name_or_path m\n")
    assert converted(script, to)["algo.name"] == "rloo" and "for spmdrl train" in capsys.readouterr().out
    script.write_text("trl kto --model_name_or_path m\n")
    assert main(["convert", str(script), "--to", str(tmp_path / "other.yaml")]) == 2
    assert "trl kto has no counterpart" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("3", "isn't a linear warm-up"),
        ("[{name: LinearLR, kwargs: {total_iters: z}}, {name: ConstantLR}]", "isn't a linear warm-up"),
        ("[{name: LinearLR, kwargs: null}, {name: a.ConstantLR}]", "optim.warmup_steps=0"),
    ],
)
def test_schedules_are_read_or_refused(
    schedule: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grpo.yaml").write_text(f"grpo: {{seed: 4}}\npolicy: {{scheduler: {schedule}, model_name: m}}\n")
    converted(tmp_path / "grpo.yaml", tmp_path / "run.yaml")
    assert words in capsys.readouterr().out


def test_the_table_is_consistent() -> None:
    spellings = spellings_of(ALIASES)
    assert set(DEFAULTS) <= set(MARKS) and set(OWN_NAMES) == set(MARKS)
    assert not [name for name in NEEDLESS if "=" not in name and name in spellings]
    for trainer, verbs in DEFAULTS.items():
        known = spellings | spellings_of(OWN_NAMES[trainer])
        assert [name for values in verbs.values() for name in values if name not in known] == []


def test_each_trainer_has_a_page_of_its_names() -> None:
    for name, lines in pages().items():
        text = "\n".join(lines)
        assert text.startswith("# ") and text.count("| `") > 10, name
    for alias in (alias for own in OWN_NAMES.values() for alias in own.values()):
        assert any(f"`{alias.name}` (`convert`)" in "\n".join(lines) for lines in pages().values())
    assert main(["help", "--coming-from=nobody"]) == 2


def test_settings_that_need_nothing_are_read_by_the_verbs_too(tmp_path: Path) -> None:
    base = ["model.make={}", "data.train=synthetic://addition?count=10"]
    loaded = load_config(
        [], [*base, "--use_remove_padding", "--packing", "--bf16", "--no_gradient_checkpointing"], "train"
    )
    assert loaded.aliases_used["use_remove_padding"].startswith("nothing to set: rows are always packed")
    assert loaded.value.model.dtype == "bfloat16" and loaded.value.train.activation_checkpointing == "none"
    file = tmp_path / "a.yaml"
    file.write_text("trainer: {balance_batch: true, nnodes: 2}\n")
    assert set(load_config([file], base, "train").aliases_used) == {"trainer.balance_batch", "trainer.nnodes"}
    with pytest.raises(ConfigError, match="per_device_train_batch_size counts rows of one process; set rollout"):
        load_config([], [*base, "per_device_train_batch_size=8"], "train")
    assert [parts for parts, _ in leaves(read_elsewhere(file, [])[0][1])] == [()]


# What a laptop hasn't: the model, its data, several devices, vLLM, and a tracker's account.
TINY = {
    "model": "{path: null, make: {hidden_size: 32, num_hidden_layers: 1, max_position_embeddings: 128}}",
    "model.dtype": "float32",
    "data.eval": "null", "data.split": "null", "data.max_rows": "null", "data.max_prompt_length": "64",
    "data.chat_template": "auto", "data.chat_template_kwargs": "{}", "data.prompt_key": "null",
    "resources": "{device: cpu}", "log.backends": "[jsonl]", "checkpoint.interval": "0", "checkpoint.best": "null",
    "checkpoint.keep_best": "null", "train.max_tokens_per_microbatch": "256", "resume": "never", "eval.interval": "0",
}  # fmt: skip
OF_VERB = {
    "train": {
        "data.train": "synthetic://addition?low=0&high=49", "data.answer_key": "null", "train.max_steps": "2",
        "rollout.prompts_per_step": "8", "rollout.max_completion_length": "6", "rollout.engine": "native",
        "rollout.num_generations": "4", "resources.generation.tensor": "1", "reward.functions": "[exact]",
        "reward.weights": "null", "reshard.swap": "auto",
    },
    "sft": {"data.train": "synthetic://addition?low=0&high=49", "sft.max_steps": "2", "sft.rows_per_step": "8"},
    "preferences": {
        "data.train": "synthetic://addition?low=0&high=49&max_error=20", "preferences.max_steps": "2",
        "preferences.rows_per_step": "8",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_written_trains_two_steps_of_a_tiny_model(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verb, run = VERBS.get(path.stem, "train"), tmp_path / "run"
    written = converted(path, tmp_path / "run.yaml")
    changed = TINY | OF_VERB[verb]
    if "critic.path" in written or written.get("algo.name") == "ppo":
        changed["critic"] = "{path: null}"
    words = [*(f"{key}={value}" for key, value in changed.items()), f"run.dir={run}"]
    assert main(["check", *([] if verb == "train" else [verb]), "run.yaml", *words]) == 0, capsys.readouterr()
    assert main([verb, "run.yaml", *words]) == 0, capsys.readouterr()
    steps = [line for line in (run / "metrics.jsonl").read_text().splitlines() if line]
    assert len(steps) == 2
    capsys.readouterr()
