"""Names from other trainers: each means here what it means there, or is refused with the right key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from spmdrl.config.given import Given, inline, show
from spmdrl.config.key_names import Alias, Convert, Settings


def _typed(given: Given, words: str, *types: type) -> Any:
    """Return the value, refused where it is of another type."""
    if type(given.value) not in types:
        raise ValueError(f"is {show(given)}, but must be {words}")
    return given.value


def _number(given: Given) -> int | float:
    value: int | float = _typed(given, "a number", int, float)
    return value


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
    num_prompts, rest = divmod(num_samples * num_updates, num_generations)
    if rest or num_prompts < 1:
        raise ValueError(
            f"is {num_samples} samples, but that x train.updates_per_step {num_updates} / rollout.num_generations "
            f"{num_generations} is no whole number of prompts; set rollout.prompts_per_step, which counts prompts"
        )
    return {"rollout.prompts_per_step": num_prompts}


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


def _epsilon(given: Given, settings: Settings) -> dict[str, Any]:
    value = _number(given)
    return {"algo.clip_ratio_low": value, "algo.clip_ratio_high": value}


def _epsilon_high(given: Given, settings: Settings) -> dict[str, Any]:
    return {} if given.value is None else {"algo.clip_ratio_high": _number(given)}


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


def _beta(given: Given, settings: Settings) -> dict[str, Any]:
    """Convert TRL's beta: DPO's in online DPO, else the KL term's weight."""
    key = "algo.beta" if settings.value("algo.name") == "online_dpo" else "algo.kl_coef"
    return {key: _number(given)}


def _kl(given: Given, settings: Settings, *, place: str) -> dict[str, Any]:
    there = settings.value("algo.kl_in")
    if settings.is_given("algo.kl_in") and there != place:
        raise ValueError(
            f"is a KL term in the {place}, but algo.kl_in is {there}; set algo.kl_coef, or algo.kl_in to {place}"
        )
    return {"algo.kl_coef": _number(given), "algo.kl_in": place}


def _tis_cap(given: Given, settings: Settings) -> dict[str, Any]:
    cap = _number(given)
    # verl turns the correction off by -1; in SkyRL use_tis: false leaves the cap without effect.
    if cap <= 0 or settings.is_given("algo.rollout_is") and settings.value("algo.rollout_is") == "none":
        return {}
    return {"algo.rollout_is_clip": cap, "algo.rollout_is": "tis"}


def _interval(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    value = _number(given)
    if isinstance(value, float):
        raise ValueError(f"is {given.text}, but {key} counts steps; set it to a whole number of them")
    return {key: 0 if value == -1 else value}


def _optimizer_steps(given: Given, settings: Settings, *, key: str) -> dict[str, Any]:
    updates = _count(settings, "train.updates_per_step") * _count(settings, "train.epochs_per_step")
    if updates > 1:
        raise ValueError(f"counts optimizer steps, of which a step has {updates} here; set {key}, which counts steps")
    return _interval(given, settings, key=key)


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


def _kl_in_loss(given: Given, settings: Settings) -> dict[str, Any]:
    return _kl(given, settings, place="loss")


def _kl_in_reward(given: Given, settings: Settings) -> dict[str, Any]:
    return _kl(given, settings, place="reward")


def _by_values(row: Mapping[str, Any]) -> Convert:
    """Return the conversion of a row of aliases.yaml that lists values."""
    key, values = row["key"], row["values"]
    way_out = row.get("advice", f"{key} may have other values")

    def convert(given: Given, settings: Settings) -> dict[str, Any]:
        value = given.value if isinstance(given.value, bool) else given.text
        if value not in values:
            choices = [inline(name) for name in values]
            words = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
            raise ValueError(f"is {show(given)}, but must be {words}; {way_out}")
        return {key: values[value]}

    return convert


_RELATIONS = (_samples, _samples_or_prompts, _prompts_of_update)
_WITH_KEY = (_interval, _optimizer_steps)
_OTHERS = (_epsilon, _epsilon_high, _delta, _beta, _kl_in_loss, _kl_in_reward, _tis_cap, _reward_funcs)
_READ: Mapping[str, Any] = {function.__name__[1:]: function for function in _RELATIONS + _WITH_KEY + _OTHERS}


def _conversion(row: Mapping[str, Any]) -> Convert | None:
    if "values" in row:
        return _by_values(row)
    function = _READ[row["read"]] if "read" in row else None
    return partial(function, key=row["key"]) if function in _WITH_KEY else function


def _aliases_of(row: Mapping[str, Any]) -> Iterator[tuple[str, Alias]]:
    convert, values = _conversion(row), row.get("values", {})
    here = row.get("here") or ", ".join(f"{inline(name)}: {inline(value)}" for name, value in values.items())
    is_relation = convert in _RELATIONS
    for entry in row["names"].split():
        trainers, name = entry.split(":")
        yield name, Alias(row["key"], trainers.replace(",", ", "), row["there"], here, convert, is_relation)


_DATA = yaml.safe_load(Path(__file__).with_name("aliases.yaml").read_bytes())
ALIASES: Mapping[str, Alias] = dict(alias for row in _DATA["aliases"] for alias in _aliases_of(row))
ADVICE: Mapping[str, str] = {name: answer for names, answer in _DATA["advice"] for name in names.split()}
"""names that have no key here, with what to do instead"""
