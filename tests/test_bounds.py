"""Every key with a least or largest value is refused outside it, by its name and with the rule."""

from __future__ import annotations

import math

import pytest

from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.algorithms.table import ALGORITHMS
from spmdrl.config.config import Config, load_config
from spmdrl.config.key_schema import describe_bounds, schema
from spmdrl.config.reader import ConfigError

BASE = ["model.make={model_type: deepseek_v3}", "data.train=synthetic://addition?count=10"]

# The bounds that keys have; one that is added is tried below without a line here.
COUNTS = """
rollout.prompts_per_step rollout.num_generations rollout.partial_max_rounds rollout.max_completion_length
rollout.max_running_rows data.max_prompt_length
train.max_steps train.updates_per_step train.epochs_per_step train.max_tokens_per_microbatch
sft.rows_per_step eval.num_samples eval.max_rows
checkpoint.keep_last checkpoint.keep_every reward.workers environment.workers
reshard.bucket_bytes model.make.hidden_size model.make.num_hidden_layers model.make.num_attention_heads
model.make.num_key_value_heads
model.make.intermediate_size model.make.max_position_embeddings model.make.num_experts model.make.num_experts_per_tok
model.make.moe_intermediate_size
""".split()
NOT_NEGATIVE = """
seed sft.max_steps optim.warmup_steps eval.interval checkpoint.interval rollout.top_k
algo.kl_coef algo.clip_ratio_high
log.samples_per_step reshard.probe_tolerance model.make.first_k_dense_replace
""".split()
FINITE = """
optim.eps optim.weight_decay rollout.temperature
train.routing.aux_loss_coefficient train.routing.bias_update_rate
""".split()
POSITIVE = """
optim.max_grad_norm rollout.kv_cache_gib
dock.timeout_seconds
""".split()
BOUNDS = (
    dict.fromkeys(COUNTS, ">= 1")
    | dict.fromkeys(NOT_NEGATIVE, ">= 0")
    | dict.fromkeys(FINITE, ">= 0 and finite")
    | dict.fromkeys(POSITIVE, "> 0")
    | dict.fromkeys(["rollout.top_p", "rollout.gpu_memory_utilization", "sft.stop_at_probability"], "> 0 and <= 1")
    | dict.fromkeys(["resources.timeout_seconds", "resources.start_timeout_seconds"], "> 0 and <= 31536000.0")
    | {"algo.clip_ratio_c": "> 1", "algo.clip_ratio_low": ">= 0 and < 1"}
    | {"rollout.min_p": ">= 0 and < 1", "reward.max_error_rate": ">= 0 and <= 1"}
    | {
        "critic.gamma": ">= 0 and <= 1",
        "critic.lam": ">= 0 and <= 1",
        "critic.warmup_steps": ">= 0",
        "environment.return_after_steps": ">= 0",
    }
    | dict.fromkeys(["reward.timeout_seconds", "environment.timeout_seconds", "critic.clip"], "> 0 and finite")
    | {"eval.temperature": "> 0 and finite", "optim.lr": ">= 0 and <= 10"}
    | dict.fromkeys(["reward.memory_limit_gib", "environment.memory_limit_gib"], "> 0 and finite")
)
OUTSIDE = {
    ">= 1": ["0", "-1"],
    ">= 0": ["-1"],
    "> 0": ["0"],
    "> 1": ["1"],
    "<= 1": ["1.01"],
    "< 1": ["1"],
    "finite": [".inf"],
}


FOUND = {
    key.name: bounds
    for key in schema(Config)
    if (bounds := describe_bounds(key.kind).removesuffix(" or null")) and set(bounds) & set("<>")
}


def test_keys_have_the_bounds_that_they_need() -> None:
    assert {key: FOUND.get(key) for key in BOUNDS} == BOUNDS


CASES = [
    (key, value, bounds)
    for key, bounds in FOUND.items()
    for part in bounds.split(" and ")
    for value in OUTSIDE.get(part, [])
]
# What optional sections can't be without.
REQUIRED = {"reward.judge": ["reward.judge.path=judge"]}
# A key that grpo has not, with an algorithm that has it.
ALGORITHM = {
    key.name: key.owner().name
    for key in schema(Config)
    if key.owner in ALGORITHMS and not hasattr(GrpoConfig(), key.name[5:])
}


@pytest.mark.parametrize(("key", "value", "bounds"), CASES)
def test_a_value_out_of_bounds_is_refused_with_the_rule_and_the_default(key: str, value: str, bounds: str) -> None:
    with pytest.raises(ConfigError) as caught:
        required = REQUIRED.get(key.rpartition(".")[0], [])
        load_config([], [*BASE, *required, f"algo.name={ALGORITHM.get(key, 'grpo')}", f"{key}={value}"])
    assert str(caught.value).startswith(f"command line: {key} is {value}, but must be {bounds}")
    assert "; the default is " in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.betas=[0.9, 1]", "optim.betas[1] is 1, but must be >= 0 and < 1; the default is [0.9, 0.999]"),
        ("optim.lr=.nan", "optim.lr is '.nan', but must be a number >= 0 and <= 10"),
        ("rollout.engine=sglang", "rollout.engine is 'sglang', but must be one of auto, native, vllm"),
        ("resources.timeout_seconds=1e9", "must be > 0 and <= 31536000.0; the default is 1800.0"),
        ("train.max_tokens_per_microbatch=0", "must be >= 1 or null; the default is null"),
    ],
)
def test_items_and_choices_are_refused_alike(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [*BASE, override])
    assert words in str(caught.value)


def test_the_bounds_themselves_are_taken() -> None:
    least = [f"{key}=1" for key in ("rollout.top_p", "eval.num_samples", "train.max_steps", "reward.max_error_rate")]
    loaded = load_config([], [*BASE, *least, "rollout.min_p=0", "seed=0", "optim.max_grad_norm=.inf"])
    assert loaded.value.rollout.top_p == 1.0 and loaded.value.optim.max_grad_norm == math.inf
