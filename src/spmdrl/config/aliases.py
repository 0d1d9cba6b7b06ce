"""Names from other trainers: each means here what it means there, or is refused with the right key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from spmdrl.config.given import Given, show
from spmdrl.config.key_names import Alias, Settings


def _typed(given: Given, words: str, *types: type) -> Any:
    """The value, refused where it is of another type."""
    if type(given.value) not in types:
        raise ValueError(f"is {show(given)}, but must be {words}")
    return given.value


def _number(given: Given) -> int | float:
    value: int | float = _typed(given, "a number", int, float)
    return value


def _count(settings: Settings, key: str) -> int:
    """A count among the settings; 1 where it is no count, which the reader of that key refuses."""
    value = settings.value(key)
    return value if isinstance(value, int) and value > 0 else 1


def _samples(given: Given, settings: Settings) -> dict[str, Any]:
    """Samples of one optimizer step to prompts of a step."""
    num_samples = _typed(given, "a whole number", int)
    num_generations = _count(settings, "rollout.num_generations")
    num_updates = _count(settings, "train.updates_per_step")
    num_prompts, rest = divmod(num_samples * num_updates, num_generations)
    if rest or num_prompts < 1:
        raise ValueError(
            f"is {num_samples} samples, but that x train.updates_per_step {num_updates} / rollout.num_generations "
            f"{num_generations} is no whole number of prompts; set rollout.prompts_per_step, which counts prompts"
        )
    return {"rollout.prompts_per_step": num_prompts}


def _epsilon(given: Given, settings: Settings) -> dict[str, Any]:
    value = _number(given)
    return {"algo.clip_ratio_low": value, "algo.clip_ratio_high": value}


def _epsilon_high(given: Given, settings: Settings) -> dict[str, Any]:
    return {} if given.value is None else {"algo.clip_ratio_high": _number(given)}


def _delta(given: Given, settings: Settings) -> dict[str, Any]:
    """TRL bounds the ratio of positive advantages too, which changes nothing above 1 + epsilon_high."""
    if given.value is None:
        return {"algo.clip_ratio_c": None}
    bound, high = _number(given), settings.value("algo.clip_ratio_high")
    if isinstance(high, int | float) and bound <= 1 + high:
        raise ValueError(
            f"is {bound}, but TRL's bound is algo.clip_ratio_c only above 1 + algo.clip_ratio_high = {1 + high:g}; "
            "raise it, or set algo.clip_ratio_c"
        )
    return {"algo.clip_ratio_c": bound}


def _kl_in_loss(given: Given, settings: Settings) -> dict[str, Any]:
    if settings.value("algo.kl_in") == "reward":
        raise ValueError("is a KL term in the loss, but algo.kl_in is reward; set algo.kl_coef, or algo.kl_in to loss")
    return {"algo.kl_coef": _number(given), "algo.kl_in": "loss"}


def _use_tis(given: Given, settings: Settings) -> dict[str, Any]:
    is_on = _typed(given, "true or false; algo.rollout_is names the other corrections", bool)
    return {"algo.rollout_is": "tis" if is_on else "none"}


def _tis_cap(given: Given, settings: Settings) -> dict[str, Any]:
    cap = _number(given)
    # verl turns the correction off by -1; in SkyRL use_tis: false leaves the cap without effect.
    if cap <= 0 or settings.is_given("algo.rollout_is") and settings.value("algo.rollout_is") == "none":
        return {}
    return {"algo.rollout_is_clip": cap, "algo.rollout_is": "tis"}


def _interval(given: Given, settings: Settings, *, key: str = "checkpoint.interval") -> dict[str, Any]:
    value = _number(given)
    if isinstance(value, float):
        raise ValueError(f"is {given.text}, but {key} counts steps; set it to a whole number of them")
    return {key: 0 if value == -1 else value}


def _save_steps(given: Given, settings: Settings) -> dict[str, Any]:
    updates = _count(settings, "train.updates_per_step") * _count(settings, "train.epochs_per_step")
    if updates > 1:
        raise ValueError(
            f"counts optimizer steps, of which a step has {updates} here; set checkpoint.interval, which counts steps"
        )
    return _interval(given, settings)


def _resume_mode(given: Given, settings: Settings) -> dict[str, Any]:
    modes = {"auto": "auto", "disable": "never"}
    if given.text not in modes:
        raise ValueError(
            f"is {show(given)}, but must be auto or disable; "
            "to go on from a checkpoint, set resume to its folder or step"
        )
    return {"resume": modes[given.text]}


def _offload(given: Given, settings: Settings) -> dict[str, Any]:
    is_on = _typed(given, "true or false; reshard.swap also takes auto", bool)
    return {"reshard.swap": "always" if is_on else "never"}


def _enforce_eager(given: Given, settings: Settings) -> dict[str, Any]:
    is_eager = _typed(given, "true or false", bool)
    return {"rollout.cuda_graphs": False if is_eager else None}


# TRL's own functions, whose names mean nothing here.
_TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")


def _reward_funcs(given: Given, settings: Settings) -> dict[str, Any]:
    specs = [str(spec) for spec in given.plain] if isinstance(given.value, list) else [given.text]
    own = [spec for spec in specs if spec in _TRL_REWARDS]
    if own:
        raise ValueError(
            f"names TRL's {', '.join(own)}; set reward.functions to built-in rules such as math, or to module:function"
        )
    return {"reward.functions": [_with_colon(spec) for spec in specs]}


def _with_colon(spec: str) -> str:
    """TRL's pkg.mod.function as pkg.mod:function."""
    module, dot, function = spec.rpartition(".")
    return f"{module}:{function}" if dot and ":" not in spec and "/" not in spec and function != "py" else spec


_FILE = "a data set's name or path"
_PROMPTS = "prompts of a step"
_SAMPLES = "samples of one optimizer step"
_TO_PROMPTS = "samples x train.updates_per_step / rollout.num_generations"
_COMPLETIONS = "responses to one prompt"
_LENGTH = "most tokens of a response"
_OFFLOADED = "true: always, false: never; weights and optimizer state leave together"
_EAGER = "whether decoding does without graphs"
_GRAPHS = "true: false, false: null, which has graphs where they can be"

ALIASES: Mapping[str, Alias] = {
    "model_name_or_path": Alias("model.path", "TRL", "a folder or hub name"),
    "model.name": Alias("model.path", "prime-rl", "a folder or hub name"),
    "train_files": Alias("data.train", "verl", "a file or a list of them"),
    "val_files": Alias("data.eval", "verl", "a file or a list of them"),
    "dataset_name": Alias("data.train", "TRL", _FILE, "a local file or folder; hub names aren't fetched"),
    "learning_rate": Alias("optim.lr", "TRL", "peak learning rate"),
    "grad_clip": Alias("optim.max_grad_norm", "verl", "largest gradient norm"),
    "max_grad_norm": Alias("optim.max_grad_norm", "TRL, NeMo-RL", "largest gradient norm"),
    "train_batch_size": Alias(
        "rollout.prompts_per_step", "verl, SkyRL", _PROMPTS, "prompts, as in verl; OpenRLHF's counts samples"
    ),
    "data.train_batch_size": Alias("rollout.prompts_per_step", "verl", _PROMPTS),
    "num_prompts_per_step": Alias("rollout.prompts_per_step", "NeMo-RL", _PROMPTS),
    "rollout_batch_size": Alias("rollout.prompts_per_step", "OpenRLHF, slime", _PROMPTS),
    "global_batch_size": Alias("rollout.prompts_per_step", "Megatron, slime", _SAMPLES, _TO_PROMPTS, _samples),
    "train_global_batch_size": Alias("rollout.prompts_per_step", "NeMo-RL", _SAMPLES, _TO_PROMPTS, _samples),
    "num_generations": Alias("rollout.num_generations", "TRL", _COMPLETIONS),
    "rollout.n": Alias("rollout.num_generations", "verl", _COMPLETIONS),
    "group_size": Alias("rollout.num_generations", "prime-rl", _COMPLETIONS),
    "n_samples_per_prompt": Alias("rollout.num_generations", "OpenRLHF, slime", _COMPLETIONS),
    "max_response_length": Alias("rollout.max_completion_length", "verl", _LENGTH),
    "data.max_response_length": Alias("rollout.max_completion_length", "verl", _LENGTH),
    "max_completion_length": Alias("rollout.max_completion_length", "TRL", _LENGTH),
    "max_new_tokens": Alias("rollout.max_completion_length", "NeMo-RL, transformers", _LENGTH),
    "beta": Alias("algo.kl_coef", "TRL", "weight of the KL term"),
    "kl_loss_coef": Alias(
        "algo.kl_coef", "verl, slime", "weight of the KL term in the loss", "and algo.kl_in=loss", _kl_in_loss
    ),
    "epsilon_high": Alias("algo.clip_ratio_high", "TRL", "clip range above 1", "null: not set", _epsilon_high),
    "epsilon": Alias(
        "algo.clip_ratio_low", "TRL", "clip range below 1, and above it unless epsilon_high is given",
        "and algo.clip_ratio_high, unless that is given", _epsilon,
    ),
    "delta": Alias(
        "algo.clip_ratio_c", "TRL", "upper bound of the ratio, above 1 + epsilon_high",
        "refused at or below 1 + algo.clip_ratio_high", _delta,
    ),
    "use_tis": Alias(
        "algo.rollout_is", "SkyRL, slime", "whether to truncate importance weights", "true: tis, false: none", _use_tis
    ),
    "tis_imp_ratio_cap": Alias(
        "algo.rollout_is_clip", "SkyRL, verl", "truncates importance weights; -1 doesn't", "and algo.rollout_is=tis",
        _tis_cap,
    ),
    "ppo_epochs": Alias("train.epochs_per_step", "verl", "times that each sample is trained on"),
    "num_iterations": Alias("train.epochs_per_step", "TRL", "times that each sample is trained on"),
    "max_tokens_per_gpu": Alias("train.max_tokens_per_microbatch", "slime", "tokens of a micro-batch on one device"),
    "save_freq": Alias("checkpoint.interval", "verl", "steps; -1 is never", "-1 is 0: the last step only", _interval),
    "save_steps": Alias(
        "checkpoint.interval", "TRL", "optimizer steps", "refused where a step has several optimizer steps", _save_steps
    ),
    "resume_mode": Alias(
        "resume", "verl", "auto, disable or resume_path", "disable: never; resume_path is refused", _resume_mode
    ),
    "test_freq": Alias(
        "eval.interval", "verl", "steps; -1 is never", "-1 is 0: before and after only",
        partial(_interval, key="eval.interval"),
    ),
    "reward_funcs": Alias(
        "reward.functions", "TRL", "names or dotted paths", "pkg.mod.fn: pkg.mod:fn; TRL's own names are refused",
        _reward_funcs,
    ),
    "param_offload": Alias("reshard.swap", "verl", "weights leave for generation", _OFFLOADED, _offload),
    "optimizer_offload": Alias("reshard.swap", "verl", "optimizer state leaves for generation", _OFFLOADED, _offload),
    "enforce_eager": Alias("rollout.cuda_graphs", "OpenRLHF, vLLM", _EAGER, _GRAPHS, _enforce_eager),
    "rollout.enforce_eager": Alias("rollout.cuda_graphs", "verl", _EAGER, _GRAPHS, _enforce_eager),
    "output_dir": Alias("run.dir", "TRL", "the run's folder"),
}  # fmt: skip
