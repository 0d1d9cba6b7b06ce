"""Names from other trainers: each means here what it means there, or is refused with the right key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

from spmdrl.config.given import Given, show
from spmdrl.config.key_names import Alias, Convert, Settings


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
    """Samples of one optimizer step: with the prompts of a step its updates, else with the updates the prompts."""
    num_samples = _typed(given, "a whole number", int)
    num_generations = _count(settings, "rollout.num_generations")
    if settings.is_given("rollout.prompts_per_step"):
        num_prompts = _count(settings, "rollout.prompts_per_step")
        return _updates(num_prompts * num_generations, num_samples, "samples", settings)
    num_updates = _count(settings, "train.updates_per_step")
    num_prompts, rest = divmod(num_samples * num_updates, num_generations)
    if rest or num_prompts < 1:
        raise ValueError(
            f"is {num_samples} samples, but that x train.updates_per_step {num_updates} / rollout.num_generations "
            f"{num_generations} is no whole number of prompts; set rollout.prompts_per_step, which counts prompts"
        )
    return {"rollout.prompts_per_step": num_prompts}


def _updates(num_all: int, num_each: int, unit: str, settings: Settings) -> dict[str, Any]:
    """The optimizer steps that a step's samples or prompts make."""
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
    """OpenRLHF's, where the prompts of a step have a name of their own."""
    if settings.is_given("rollout.prompts_per_step"):
        return _samples(given, settings)
    raise ValueError(
        "is samples of an optimizer step in OpenRLHF, and prompts of a step in SkyRL; set global_batch_size to the "
        "first, or rollout.prompts_per_step to the second"
    )


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


def _beta(given: Given, settings: Settings) -> dict[str, Any]:
    """TRL's online DPO has DPO's beta."""
    key = "algo.beta" if settings.value("algo.name") == "online_dpo" else "algo.kl_coef"
    return {key: _number(given)}


def _kl(given: Given, settings: Settings, *, place: str) -> dict[str, Any]:
    there = settings.value("algo.kl_in")
    if settings.is_given("algo.kl_in") and there != place:
        raise ValueError(
            f"is a KL term in the {place}, but algo.kl_in is {there}; set algo.kl_coef, or algo.kl_in to {place}"
        )
    return {"algo.kl_coef": _number(given), "algo.kl_in": place}


def _named(given: Given, settings: Settings, *, key: str, names: Mapping[str, Any], advice: str) -> dict[str, Any]:
    """A choice under another name."""
    if given.text not in names:
        raise ValueError(f"is {show(given)}, but must be one of {', '.join(names)}; {advice}")
    return {key: names[given.text]}


def _switch(given: Given, settings: Settings, *, key: str, on: Any, off: Any) -> dict[str, Any]:
    return {key: on if _typed(given, f"true or false; {key} may have other values", bool) else off}


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


def _optimizer_steps(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    updates = _count(settings, "train.updates_per_step") * _count(settings, "train.epochs_per_step")
    if updates > 1:
        raise ValueError(f"counts optimizer steps, of which a step has {updates} here; set {key}, which counts steps")
    return _interval(given, settings, key=key)


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


_SWAP = partial(_switch, key="reshard.swap", on="always", off="never")
_SWAPPED = "true: always, false: never; weights and optimizer state leave together"
_LOSSES = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
_LOSS_ADVICE = "set algo.loss_agg; losses of pairs are for the verb preferences, or algo.loss_type of online_dpo"
_KLS = {"low_var_kl": "k3", "kl": "k1", "mse": "k2", "k1": "k1", "k2": "k2", "k3": "k3"}
_RESUME_ADVICE = "to go on from a checkpoint, set resume to its folder or step"
_SEVERAL = "refused where a step has several optimizer steps"

_Row: TypeAlias = "tuple[str, str, str] | tuple[str, str, str, str, Convert]"
# Names with the trainers that they come from, the key, what it is there, what is set here besides, and the conversion.
_ROWS: tuple[_Row, ...] = (
    ("TRL:model_name_or_path prime-rl:model.name OpenRLHF:pretrain slime:hf_checkpoint", "model.path",
     "a folder or hub name"),
    ("TRL:bf16", "model.dtype", "whether to compute in bfloat16", "true: bfloat16, false: float32",
     partial(_switch, key="model.dtype", on="bfloat16", off="float32")),
    ("verl:train_files", "data.train", "a file or a list of them"),
    ("TRL:dataset_name", "data.train", "a data set's name or path: a local file or folder; hub names aren't fetched"),
    ("verl:val_files", "data.eval", "a file or a list of them"),
    ("TRL,verl:max_prompt_length OpenRLHF:prompt_max_len", "data.max_prompt_length", "most tokens of a prompt"),
    ("TRL:learning_rate verl,slime:lr OpenRLHF:actor_learning_rate", "optim.lr", "peak learning rate"),
    ("verl:grad_clip TRL,NeMo-RL:max_grad_norm slime:clip_grad", "optim.max_grad_norm", "largest gradient norm"),
    ("TRL,verl:weight_decay", "optim.weight_decay", "decoupled weight decay"),
    ("TRL:warmup_steps verl:lr_warmup_steps", "optim.warmup_steps", "optimizer steps of the warm-up"),
    ("TRL:num_generations verl:rollout.n prime-rl:group_size OpenRLHF,slime:n_samples_per_prompt "
     "NeMo-RL:num_generations_per_prompt", "rollout.num_generations", "responses to one prompt"),
    ("verl:data.train_batch_size SkyRL:trainer.train_batch_size NeMo-RL:num_prompts_per_step "
     "OpenRLHF,slime:rollout_batch_size", "rollout.prompts_per_step", "prompts of a step"),
    ("Megatron,slime:global_batch_size NeMo-RL:train_global_batch_size", "rollout.prompts_per_step",
     "samples of one optimizer step", "samples x train.updates_per_step / rollout.num_generations; beside the prompts "
     "of a step, train.updates_per_step", _samples),
    ("OpenRLHF,SkyRL:train_batch_size", "rollout.prompts_per_step", "samples of one optimizer step; prompts of a step",
     "as global_batch_size beside rollout_batch_size; alone it is refused", _samples_or_prompts),
    ("verl:ppo_mini_batch_size", "train.updates_per_step", "prompts of one optimizer step",
     "rollout.prompts_per_step / prompts", _prompts_of_update),
    ("verl:max_response_length verl:data.max_response_length TRL:max_completion_length slime:rollout_max_response_len "
     "NeMo-RL,transformers:max_new_tokens OpenRLHF:generate_max_len", "rollout.max_completion_length",
     "most tokens of a response"),
    ("TRL:temperature slime:rollout_temperature", "rollout.temperature", "sampling temperature"),
    ("TRL:top_p slime:rollout_top_p", "rollout.top_p", "share of the probability that is sampled from"),
    ("TRL:top_k", "rollout.top_k", "likeliest tokens that are sampled from"),
    ("TRL:min_p", "rollout.min_p", "least share of the likeliest token's probability"),
    ("TRL:vllm_gpu_memory_utilization vLLM:gpu_memory_utilization", "rollout.gpu_memory_utilization",
     "share of the device's memory"),
    ("OpenRLHF,vLLM:enforce_eager verl:rollout.enforce_eager", "rollout.cuda_graphs",
     "whether decoding does without graphs", "true: false, false: null, which has graphs where they can be",
     partial(_switch, key="rollout.cuda_graphs", on=False, off=None)),
    ("TRL:beta", "algo.kl_coef", "weight of the KL term; DPO's beta", "algo.beta where algo.name is online_dpo", _beta),
    ("verl,slime:kl_loss_coef NeMo-RL:reference_policy_kl_penalty", "algo.kl_coef", "weight of the KL term in the loss",
     "and algo.kl_in=loss", partial(_kl, place="loss")),
    ("slime,verl:kl_coef OpenRLHF:init_kl_coef", "algo.kl_coef", "weight of the KL term in the reward",
     "and algo.kl_in=reward", partial(_kl, place="reward")),
    ("verl,slime:kl_loss_type OpenRLHF:algo.kl.estimator", "algo.kl_estimator", "k1 (kl), k2 (mse), k3 (low_var_kl)",
     "k1, k2 or k3", partial(_named, key="algo.kl_estimator", names=_KLS, advice="set algo.kl_estimator")),
    ("TRL:loss_type", "algo.loss_agg", "how token losses are averaged; DPO's loss",
     ", ".join(f"{name}: {ours}" for name, ours in _LOSSES.items()),
     partial(_named, key="algo.loss_agg", names=_LOSSES, advice=_LOSS_ADVICE)),
    ("TRL:epsilon_high slime:eps_clip_high", "algo.clip_ratio_high", "clip range above 1", "null: not set",
     _epsilon_high),
    ("TRL:epsilon slime:eps_clip", "algo.clip_ratio_low",
     "clip range below 1, and above it unless that is given", "and algo.clip_ratio_high, unless it is given", _epsilon),
    ("NeMo-RL:ratio_clip_min", "algo.clip_ratio_low", "clip range below 1"),
    ("NeMo-RL:ratio_clip_max", "algo.clip_ratio_high", "clip range above 1"),
    ("TRL:delta", "algo.clip_ratio_c", "upper bound of the ratio, above 1 + epsilon_high",
     "refused at or below 1 + algo.clip_ratio_high", _delta),
    ("TRL,slime:entropy_coef verl:entropy_coeff", "algo.entropy_coef", "weight of the entropy"),
    ("TRL:importance_sampling_level", "algo.ratio_level", "token or sequence"),
    ("TRL:scale_rewards", "algo.scale_rewards", "by which deviation rewards are scaled"),
    ("SkyRL,slime:use_tis", "algo.rollout_is", "whether to truncate importance weights", "true: tis, false: none",
     partial(_switch, key="algo.rollout_is", on="tis", off="none")),
    ("SkyRL,verl:tis_imp_ratio_cap", "algo.rollout_is_clip", "truncates importance weights; -1 doesn't",
     "and algo.rollout_is=tis", _tis_cap),
    ("OpenRLHF:model.beta", "preferences.beta", "DPO's beta"),
    ("TRL:label_smoothing", "preferences.label_smoothing", "share of swapped pairs"),
    ("TRL:lora_r verl,OpenRLHF:lora_rank", "lora.rank", "rank of adapters"),
    ("TRL,verl:lora_alpha", "lora.alpha", "scale of adapters"),
    ("TRL:lora_target_modules verl:target_modules", "lora.targets", "projections with adapters"),
    ("verl:total_training_steps NeMo-RL:max_num_steps slime:num_rollout", "train.max_steps", "steps"),
    ("TRL:max_steps", "train.max_steps", "optimizer steps", _SEVERAL, partial(_optimizer_steps, key="train.max_steps")),
    ("verl:ppo_epochs TRL:num_iterations", "train.epochs_per_step", "times that each sample is trained on"),
    ("slime:max_tokens_per_gpu verl:ppo_max_token_len_per_gpu", "train.max_tokens_per_microbatch",
     "tokens of a micro-batch on one device"),
    ("TRL:gradient_checkpointing", "train.activation_checkpointing", "whether layers run again in the backward pass",
     "true: full, false: none", partial(_switch, key="train.activation_checkpointing", on="full", off="none")),
    ("TRL:reward_funcs", "reward.functions", "names or dotted paths",
     "pkg.mod.fn: pkg.mod:fn; TRL's own names are refused", _reward_funcs),
    ("TRL:reward_weights", "reward.weights", "weight of each reward function"),
    ("verl:save_freq", "checkpoint.interval", "steps; -1 is never", "-1 is 0: the last step only", _interval),
    ("TRL:save_steps", "checkpoint.interval", "optimizer steps", _SEVERAL,
     partial(_optimizer_steps, key="checkpoint.interval")),
    ("TRL:save_total_limit verl:max_actor_ckpt_to_keep", "checkpoint.keep_last", "checkpoints that are kept"),
    ("verl:test_freq", "eval.interval", "steps; -1 is never", "-1 is 0: before and after only",
     partial(_interval, key="eval.interval")),
    ("TRL:eval_steps", "eval.interval", "optimizer steps", _SEVERAL, partial(_optimizer_steps, key="eval.interval")),
    ("TRL:eval_on_start verl:val_before_train", "eval.before_train", "whether to evaluate before the first step"),
    ("verl:resume_mode", "resume", "auto, disable or resume_path", "disable: never; resume_path is refused",
     partial(_named, key="resume", names={"auto": "auto", "disable": "never"}, advice=_RESUME_ADVICE)),
    ("verl:param_offload", "reshard.swap", "weights leave for generation", _SWAPPED, _SWAP),
    ("verl:optimizer_offload", "reshard.swap", "optimizer state leaves for generation", _SWAPPED, _SWAP),
    ("TRL:output_dir", "run.dir", "the run's folder"),
    ("TRL:run_name verl:experiment_name", "run.name", "the run's name"),
)  # fmt: skip
_RELATIONS = (_samples, _samples_or_prompts, _prompts_of_update)


def _alias(origin: str, key: str, there: str, here: str = "", convert: Convert | None = None) -> Alias:
    return Alias(key, origin.replace(",", ", "), there, here, convert, is_relation=convert in _RELATIONS)


ALIASES: Mapping[str, Alias] = {
    name: _alias(origin, *row)
    for names, *row in _ROWS
    for origin, name in (entry.split(":") for entry in names.split())
}
