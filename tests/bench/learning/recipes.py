"""The task on which algorithms are compared, the sizes that all of them share, and what one needs besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

Settings = Mapping[str, object]

_ADDITION = "synthetic://addition?low=0&high=49&test_fraction=0.15"
NUM_HELD_OUT = 375
"""all pairs that are never trained on"""
HELD_OUT = f"{_ADDITION}&count={NUM_HELD_OUT}&split=test"
_TRAINING = f"{_ADDITION}&count=2000"
_ROWS: Settings = {
    "data.train": _TRAINING,
    "data.eval": HELD_OUT,
    "checkpoint.interval": 0,
    "log.backends": "[jsonl]",
}
PROMPTS = _ROWS | {"rollout.max_completion_length": 6, "reward.functions": "[exact]"}
START: Settings = PROMPTS | {
    "model.make": "{hidden_size: 128, num_hidden_layers: 5, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 384, max_position_embeddings: 64}",
    "sft.max_steps": 600,
    "sft.rows_per_step": 256,
    "sft.stop_at_probability": 0.5,
    "sft.optim": "{lr: 3.0e-3, warmup_steps: 20, betas: [0.9, 0.95]}",
    "eval.before_train": "false",
}
"""The supervised training that makes the checkpoint; stopped while its learning rate is high, it can be improved."""
SHARED: Settings = PROMPTS | {
    "rollout.prompts_per_step": 64,
    "rollout.num_generations": 8,
    "rollout.max_running_rows": 512,
    # A step's second update is off-policy, so that what algorithms do about it counts.
    "train.updates_per_step": 2,
    "optim.betas": "[0.9, 0.95]",
    "optim.warmup_steps": 5,
    "optim.schedule": "cosine",
}
_PAIRS: Settings = _ROWS | {
    # Wrong sums are off by up to so much.
    "data.train": f"{_TRAINING}&max_error=20",
    "data.eval": f"{HELD_OUT}&max_error=20",
}
PAIR_VERBS: Mapping[str, Settings] = {
    "preferences": _PAIRS
    | {
        "preferences.max_steps": 120,
        "preferences.rows_per_step": 64,
        "preferences.optim": "{lr: 1.0e-4, warmup_steps: 10}",
        "eval.interval": 24,
    },
    "reward-model": _PAIRS
    | {
        "reward_model.max_steps": 480,
        "reward_model.rows_per_step": 64,
        "reward_model.centring": 0.01,
        "reward_model.optim": "{lr: 1.0e-3, warmup_steps: 10, schedule: cosine}",
        "eval.interval": 96,
    },
}
"""Verbs that learn from pairs of a right and a wrong sum, whose accuracy is that of ordering held-out pairs."""

QUICKSTART = Path("configs/debug/quickstart.yaml")
_LEARNING: Settings = _ROWS | {
    # Responses have up to six tokens: a window of four and steps that leave the last ones unfinished cut into them.
    "rollout.partial_max_rounds": 2,
    "rollout.max_running_rows": 768,
    "algo.rollout_is": "tis",
    "eval.interval": 44,
}
FAMILIES: Mapping[str, Settings] = {
    "qwen3": _LEARNING,
    "qwen3_5_text": _LEARNING | {"model.make.model_type": "qwen3_5_text"},
    "gpt_oss": _LEARNING
    | {
        "model.make.model_type": "gpt_oss",
        "model.make.sliding_window": 4,
        "model.make.num_experts": 4,
        "model.make.moe_intermediate_size": 96,
    },
}
"""Model families that learn quickstart's task by partial rollout on two ranks, from a supervised start of their own."""


@dataclass(frozen=True)
class Recipe:
    """What an algorithm needs beside its paper's values."""

    lr: float = 5e-4
    """AdamW's steps don't depend on the loss's scale, so most losses can have the same"""
    settings: Settings = field(default_factory=dict)
    needs_teacher: bool = False
    """whether it distils what another algorithm has trained from the same checkpoint"""
    times_steps: int = 1
    """how many times as many steps as others it makes"""


# A critic that begins as the policy's model with a new head must learn faster than the policy does.
_CRITIC: Settings = {"critic.optim": "{lr: 1.0e-3, warmup_steps: 5}", "critic.lam": 0.95, "critic.clip": 0.2}

TEACHER = "gspo"
"""the algorithm whose first run is the teacher of those that need one"""
RECIPES: Mapping[str, Recipe] = {
    # No ratio and no clip hold a step's second update back.
    "rloo": Recipe(lr=2.5e-4),
    # Its bound, on differences of probabilities, leaves in what unlikely tokens' ratios would clip.
    "dppo": Recipe(lr=2.5e-4),
    # Its gate never closes.
    "sapo": Recipe(lr=2.5e-4),
    # Two of eight responses are trained on, so that gradients are noisier.
    "online_dpo": Recipe(lr=2.5e-4),
    "ppo": Recipe(settings=_CRITIC),
    "pf_ppo": Recipe(settings=_CRITIC),
    # After as many steps as its teacher made, a student is still on its way.
    "opd": Recipe(needs_teacher=True, times_steps=2),
    # The model has fewer tokens than the default compares.
    "gkd": Recipe(settings={"algo.top_k": 8}, needs_teacher=True, times_steps=2),
}


def recipe_of(algorithm: str) -> Recipe:
    return RECIPES.get(algorithm, Recipe())
