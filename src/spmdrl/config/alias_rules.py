"""Conversions of other trainers' settings that count or name something else than ours.

Each takes a written value and all settings, returns canonical keys with their values, and raises ValueError with the
rest of a sentence that begins with the name as written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from spmdrl.config.given import Given, show
from spmdrl.config.key_names import Convert, Settings


def _typed(given: Given, words: str, *types: type) -> Any:
    """Return the value, refused where it is of another type."""
    if type(given.value) not in types:
        raise ValueError(f"is {show(given)}, but must be {words}")
    return given.value


def _number(given: Given) -> int | float:
    value: int | float = _typed(given, "a number", int, float)
    return value


def _texts(given: Given) -> list[str]:
    """Return a list's texts, or one text as a list; the shell leaves commas behind the words of a list."""
    items = given.plain if isinstance(given.value, list) else given.text.split(",")
    return [text for item in items if (text := str(item).strip().strip(","))]


def _count(settings: Settings, key: str) -> int:
    """Return a count among the settings; 1 where it is no count, which the reader of that key refuses."""
    value = settings.value(key)
    return value if isinstance(value, int) and value > 0 else 1


def _samples(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert samples per optimizer step to updates if a step's prompts are given, else to prompts."""
    num_samples = _typed(given, "a whole number", int)
    num_generations = _count(settings, "rollout.num_generations")
    if settings.is_given("rollout.prompts_per_step"):
        num_prompts = _count(settings, "rollout.prompts_per_step")
        return _updates(num_prompts * num_generations, num_samples, "samples", settings)
    num_updates = _count(settings, "train.updates_per_step")
    return {"rollout.prompts_per_step": _prompts(num_samples * num_updates, settings)}


def _prompts(num_samples: int, settings: Settings) -> int:
    """Return the prompts of a step with this many samples."""
    num_generations = _count(settings, "rollout.num_generations")
    num_prompts, rest = divmod(num_samples, num_generations)
    if rest or num_prompts < 1:
        raise ValueError(
            f"makes {num_samples} samples, but that / rollout.num_generations {num_generations} is no whole number of "
            "prompts; set rollout.prompts_per_step, which counts prompts"
        )
    return num_prompts


def _updates(num_all: int, num_each: int, unit: str, settings: Settings) -> dict[str, Any]:
    """Return the optimizer steps into which a step's samples or prompts divide."""
    num_updates, rest = divmod(num_all, max(num_each, 1))
    given = settings.value("train.updates_per_step") if settings.is_given("train.updates_per_step") else num_updates
    if rest or num_each < 1 or num_updates < 1 or given != num_updates:
        raise ValueError(
            f"is {num_each} {unit} per optimizer step, but a step's {num_all} {unit} must be a multiple of that, by "
            "train.updates_per_step if it is given; set rollout.prompts_per_step and train.updates_per_step"
        )
    return {"train.updates_per_step": num_updates}


def _prompts_of_update(given: Given, settings: Settings) -> dict[str, Any]:
    num_prompts = _count(settings, "rollout.prompts_per_step")
    return _updates(num_prompts, _typed(given, "a whole number", int), "prompts", settings)


def _samples_or_prompts(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert OpenRLHF's count of samples; refused without OpenRLHF's own name for a step's prompts."""
    if settings.is_given("rollout.prompts_per_step"):
        return _samples(given, settings)
    raise ValueError(
        "is samples of an optimizer step in OpenRLHF, and prompts of a step in SkyRL; set global_batch_size to the "
        "first, or rollout.prompts_per_step to the second"
    )


# What TRL multiplies with the rows of one process.
_FACTORS = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")


def _rows_per_process(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert TRL's rows of one process in one backward pass to those of a step over all ranks."""
    num_rows = _typed(given, "a whole number", int)
    _refuse_without_ranks(settings)
    num_accumulated = _count(settings, "gradient_accumulation_steps")
    of_update = num_rows * _count(settings, "num_ranks") * num_accumulated
    if settings.verb in ("sft", "preferences", "reward-model"):
        return {"rollout.prompts_per_step": of_update}
    num_passes = _count(settings, "steps_per_generation") if settings.is_given("steps_per_generation") else None
    of_step = of_update if num_passes is None else of_update // num_accumulated * num_passes
    if settings.is_given("generation_batch_size"):
        of_step = _count(settings, "generation_batch_size")
    updates = {} if of_step == of_update else _updates(of_step, of_update, "samples", settings)
    return {"rollout.prompts_per_step": _prompts(of_step, settings)} | updates


def _factor(given: Given, settings: Settings) -> dict[str, Any]:
    """Leave a factor of TRL's batch to the rows per process."""
    _refuse_without_ranks(settings)
    if not settings.is_given(settings.home("rollout.prompts_per_step")):
        raise ValueError("counts passes of per_device_train_batch_size rows, which isn't given; give it too")
    return {}


def _refuse_without_ranks(settings: Settings) -> None:
    if not settings.is_given("num_ranks"):
        raise ValueError(
            "counts rows of one process; set rollout.prompts_per_step (rows_per_step in sft, preferences and "
            "reward_model) and train.updates_per_step, or let `spmdrl convert` work them out; micro-batches are cut by "
            "train.max_tokens_per_microbatch"
        )


def _total_length(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert the length of a prompt with its response to that of the response."""
    if given.value is None or settings.is_given("rollout.max_completion_length"):
        return {}
    total, of_prompt = _typed(given, "a whole number", int), _count(settings, "data.max_prompt_length")
    if total <= of_prompt:
        raise ValueError(
            f"is {total} tokens of prompt and response, but data.max_prompt_length is {of_prompt}; set both "
            "data.max_prompt_length and rollout.max_completion_length"
        )
    return {"rollout.max_completion_length": total - of_prompt}


def _epsilon(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert a range for both sides, each of which may have a name of its own beside it."""
    value = _number(given)
    return {key: value for key in ("algo.clip_ratio_low", "algo.clip_ratio_high") if not settings.is_given(key)}


def _epsilon_both(given: Given, settings: Settings) -> dict[str, Any]:
    if not isinstance(given.value, list) or len(given.value) != 2:
        raise ValueError(f"is {show(given)}, but must be two numbers; set algo.clip_ratio_low and algo.clip_ratio_high")
    low, high = map(_number, given.value)
    return {"algo.clip_ratio_low": low, "algo.clip_ratio_high": high}


def _delta(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert TRL's bound, which also caps the ratio of positive advantages; no change above 1 + epsilon_high."""
    if given.value is None:
        return {"algo.clip_ratio_c": None}
    bound, high = _number(given), settings.value("algo.clip_ratio_high")
    if isinstance(high, int | float) and bound <= 1 + high:
        raise ValueError(
            f"is {bound}, but TRL's bound is algo.clip_ratio_c only above 1 + algo.clip_ratio_high = {1 + high:g}; "
            "raise it, or set algo.clip_ratio_c"
        )
    return {"algo.clip_ratio_c": bound}


def _loss_of_pairs(given: Given, settings: Settings, *, choose: Convert) -> dict[str, Any]:
    """Convert TRL's loss: in DPO, some of its kinds are means over tokens."""
    if settings.verb != "preferences":
        return choose(given, settings)
    name: str = _typed(given, "one name", str)
    mean = {"preferences.length_normalized": True} if name in ("ipo", "sigmoid_norm") else {}
    return {"preferences.loss_type": name.removesuffix("_norm"), **mean}


def _beta(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert TRL's beta: DPO's in online DPO, else the KL term's weight."""
    key = "algo.beta" if settings.value("algo.name") == "online_dpo" else "algo.kl_coef"
    return {key: _number(given)}


_KL_NAMES = ("kl_loss_coef", "reference_policy_kl_penalty", "kl_coef", "init_kl_coef")


def _kl(given: Given, settings: Settings, place: str, switch: str) -> dict[str, Any]:
    """Convert the weight of a KL term, which is 0 where the trainer's own switch turns the term off."""
    value, there = _number(given), settings.value("algo.kl_in")
    value = 0.0 if settings.value(switch) is False else value
    # Configurations may have the weights of both terms, one of them 0.
    if not value and (settings.is_given("algo.kl_coef") or any(map(settings.is_given, _KL_NAMES))):
        return {}
    if settings.is_given("algo.kl_in") and there != place:
        raise ValueError(
            f"is a KL term in the {place}, but algo.kl_in is {there}; set algo.kl_coef, or algo.kl_in to {place}"
        )
    if settings.is_given("algo.kl_coef"):
        raise ValueError("sets algo.kl_coef, which is given under another name too; keep one")
    estimator = {} if place == "loss" else {"algo.kl_estimator": "k1"}
    return {"algo.kl_coef": value, "algo.kl_in": place, **estimator}


def _kl_in_loss(given: Given, settings: Settings) -> dict[str, Any]:
    return _kl(given, settings, "loss", "use_kl_loss")


def _kl_in_reward(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert the weight of verl's term: that of REINFORCE++ is in each token's return."""
    place = "advantage" if settings.value("algo.name") == "reinforce_pp" else "reward"
    return _kl(given, settings, place, "use_kl_in_reward")


def _kl_anywhere(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert OpenRLHF's weight: in the loss with use_kl_loss, else behind the comparison of rewards that PPO lacks."""
    beside = "reward" if settings.value("algo.name") == "ppo" else "advantage"
    return _kl(given, settings, "loss" if settings.value("use_kl_loss") is True else beside, "")


def _kl_penalty(given: Given, settings: Settings, *, choose: Convert) -> dict[str, Any]:
    return choose(given, settings) if settings.value("use_kl_in_reward") is True else {}


def _kl_switch(given: Given, settings: Settings) -> dict[str, Any]:
    if _typed(given, "true or false", bool) and not settings.is_given("algo.kl_coef"):
        raise ValueError("turns a KL term on, whose weight isn't given; set algo.kl_coef and algo.kl_in")
    return {}


def _tis_cap(given: Given, settings: Settings) -> dict[str, Any]:
    if given.value is None:
        return {}
    cap = _number(given)
    # verl turns the correction off by -1; in SkyRL use_tis: false leaves the cap without effect.
    if cap <= 0 or settings.is_given("algo.rollout_is") and settings.value("algo.rollout_is") == "none":
        return {}
    return {"algo.rollout_is_clip": cap, "algo.rollout_is": "tis"}


_DYNAMIC = ("dynamic_filtering", "use_dynamic_sampling", "filter_groups.enable")


def _algorithm(given: Given, settings: Settings, *, choose: Convert) -> dict[str, Any]:
    """Convert an estimator's name; GRPO with prompts sampled again where all responses are alike is DAPO here."""
    chosen = choose(given, settings)
    is_dynamic = any(settings.value(name) is True for name in _DYNAMIC)
    if is_dynamic and chosen == {"algo.name": "grpo"}:
        return {"algo.name": "dapo"}
    # Elsewhere these are ways to compute advantages alone: the loss is PPO's.
    if chosen["algo.name"] in ("rloo", "dr_grpo"):
        chosen |= {"algo.ratio_level": "token", "algo.loss_agg": "token-mean"}
    return chosen


def _dynamic(given: Given, settings: Settings) -> dict[str, Any]:
    is_dynamic = _typed(given, "true or false", bool)
    return {"algo.name": "dapo"} if is_dynamic and not settings.is_given("algo.name") else {}


def _together(given: Given, settings: Settings, *, choose: Convert) -> dict[str, Any]:
    """Convert a switch of two, which are one here and may not differ."""
    chosen = choose(given, settings)
    for key, value in chosen.items():
        if settings.is_given(key) and settings.value(key) != value:
            raise ValueError(f"is {show(given)}, but {key} is {settings.value(key)}, for both; set that alone")
    return chosen


def _of_critic(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    if settings.value("algo.name") == "ppo":
        return {key: _number(given)}
    if given.value != 1:
        raise ValueError(f"is {show(given)}, but only algo.name=ppo discounts, by {key}; set it to 1, or leave it out")
    return {}


def _part_of_critic(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    """Take a setting of a critic, of which other trainers' group-relative algorithms have none."""
    if settings.value("algo.name") == "ppo":
        return {key: given.plain}
    if given.value:
        raise ValueError(f"is of a critic, which only algo.name=ppo has; set {key} for one beside another algorithm")
    return {}


def _betas(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert the first of Adam's coefficients together with the second."""
    second = settings.value("adam_beta2")
    return {"optim.betas": [_number(given), 0.999 if second is None else second]}


def _second_beta(given: Given, settings: Settings) -> dict[str, Any]:
    return {} if settings.is_given("optim.betas") else {"optim.betas": [0.9, _number(given)]}


def _warmup(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert a list of PyTorch's schedulers: a linear warm-up before a constant rate."""
    listed = given.plain if isinstance(given.value, list) else []
    parts = [part for part in listed if isinstance(part, dict) and "name" in part]
    kinds = [str(part["name"]).rpartition(".")[2] for part in parts]
    steps = [(part.get("kwargs") or {}).get("total_iters", 0) for part in parts if "Linear" in str(part["name"])]
    is_plain = kinds and not set(kinds) - {"LinearLR", "ConstantLR"} and len(steps) < 2
    if not is_plain or not all(isinstance(number, int) for number in steps):
        raise ValueError("isn't a linear warm-up and a constant rate; set optim.warmup_steps and optim.schedule")
    return {"optim.warmup_steps": sum(steps) * _num_updates(settings), "optim.schedule": "constant"}


def _num_updates(settings: Settings) -> int:
    """Return the optimizer steps of a step."""
    return _count(settings, "train.updates_per_step") * _count(settings, "train.epochs_per_step")


def _warmup_of_steps(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert verl's warm-up, whose rate changes once per step; -1 leaves it to the ratio."""
    num_steps = _typed(given, "a whole number", int)
    return {} if num_steps < 0 else {"optim.warmup_steps": num_steps * _num_updates(settings)}


def _use_peft(given: Given, settings: Settings) -> dict[str, Any]:
    has_adapters = _typed(given, "true or false", bool) and not settings.is_given("lora")
    return {"lora": {}} if has_adapters else {}


def _projections(given: Given, settings: Settings) -> dict[str, Any]:
    names = _texts(given)
    return {"lora.targets": [] if names == ["all-linear"] else names}


def _unless_null(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    """Take a value as it is, and null for a key that isn't set."""
    return {} if given.value is None else {key: given.plain}


def _unless_zero(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    return {key: given.plain} if given.value else {}


def _most_likely(given: Given, settings: Settings) -> dict[str, Any]:
    return {"rollout.top_k": 0 if given.value in (None, -1) else given.plain}


def _interval(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    value = _number(given)
    if isinstance(value, float):
        raise ValueError(f"is {given.text}, but {key} counts steps; set it to a whole number of them")
    return {key: 0 if value == -1 else value}


def _optimizer_steps(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    converted, updates = _interval(given, settings, key=key), _num_updates(settings)
    if given.value == -1 and key == "train.max_steps":
        return {}
    steps, rest = divmod(converted[key], updates)
    if rest:
        raise ValueError(f"counts optimizer steps, of which a step has {updates} here; set {key}, which counts steps")
    return {key: steps}


def _keep_top(given: Given, settings: Settings) -> dict[str, Any]:
    key = "checkpoint.keep_best" if settings.is_given("checkpoint.best") else "checkpoint.keep_last"
    return {key: given.plain}


def _best_mode(given: Given, settings: Settings) -> dict[str, Any]:
    mode = "max" if _typed(given, "true or false", bool) else "min"
    return {"checkpoint.best_mode": mode} if settings.is_given("checkpoint.best") else {}


# TRL's own functions, which don't exist here.
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
    """Rewrite TRL's pkg.mod.function as pkg.mod:function."""
    module, dot, function = spec.rpartition(".")
    return f"{module}:{function}" if dot and ":" not in spec and "/" not in spec and function != "py" else spec


def _reward_file(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert OpenRLHF's file with a function reward_func."""
    if not given.text.endswith(".py"):
        raise ValueError("isn't a Python file; a function of reward.functions may query a server")
    return {"reward.functions": [f"{given.text}:reward_func"]}


def _backends(given: Given, settings: Settings) -> dict[str, Any]:
    names = [name for name in _texts(given) if name not in ("console", "none", "null")]
    others = [name for name in names if name not in _TRACKERS]
    if others:
        raise ValueError(f"names {', '.join(others)}; log.backends takes {', '.join(_TRACKERS)}")
    return {"log.backends": ["console", "jsonl", *names]}


_TRACKERS = ("wandb", "tensorboard", "trackio", "mlflow")


def _named_files(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert slime's names and files of evaluations, in turn."""
    texts = _texts(given)
    return {"data.eval": texts[1::2] if len(texts) > 1 else texts[0]} if texts else {}


def _data_set(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert a data set's name, of the hub unless it is a file or folder, with its configuration."""
    name = _typed(given, "one name", str)
    is_path = name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith(_DATA_FILES)
    config = next((part for part in map(settings.value, _CONFIGS) if part is not None), None)
    asked = "" if config is None else f"?{urlencode({'config': config})}"
    return {"data.train": name if is_path or Path(name).exists() else f"hub://{name}{asked}"}


_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
_CONFIGS = ("dataset_config", "train.env.taskset.dataset_subset")


def _limit(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    value = _typed(given, "a whole number", int)
    return {key: None if value == -1 else value}


def _part_of_data_set(given: Given, settings: Settings) -> dict[str, Any]:
    return {}


RELATIONS = (
    *(_samples, _samples_or_prompts, _prompts_of_update, _rows_per_process, _factor, _total_length),
    *(_kl_in_loss, _kl_in_reward, _kl_anywhere, _kl_switch, _kl_penalty, _dynamic, _betas, _second_beta, _use_peft),
    *(_data_set, _part_of_data_set, _together, _epsilon),
)
"""rules of settings that may stand beside each other and beside the key that they set"""
WITH_KEY = (_interval, _optimizer_steps, _unless_null, _unless_zero, _of_critic, _part_of_critic, _limit)
"""rules that take the key that they set"""
_OTHERS = (
    *(_epsilon_both, _delta, _beta, _tis_cap, _warmup, _warmup_of_steps, _projections, _most_likely, _keep_top),
    *(_best_mode, _reward_funcs, _reward_file, _backends, _named_files, _algorithm, _loss_of_pairs),
)
RULES: Mapping[str, Callable[..., dict[str, Any]]] = {
    function.__name__[1:]: function for function in (*RELATIONS, *WITH_KEY, *_OTHERS)
}
"""rules by the names that aliases.yaml has for them"""
