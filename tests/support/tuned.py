"""Settings whose constants tests vary."""

from __future__ import annotations

from dataclasses import dataclass

from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.nouns.settings.training_config import TrainingConfig


@dataclass(frozen=True)
class TunedRollout(RolloutConfig):
    """Rollouts with other constants of the native engine."""

    max_prefill_tokens: int = RolloutConfig.max_prefill_tokens
    block_size: int = RolloutConfig.block_size
    pack_weights: bool = RolloutConfig.pack_weights


@dataclass(frozen=True)
class TunedTraining(TrainingConfig):
    """Training that may compute equal prompts again and again."""

    share_prompts: bool = TrainingConfig.share_prompts
