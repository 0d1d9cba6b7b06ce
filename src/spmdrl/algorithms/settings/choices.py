"""The settings that `algo.name` chooses among, in the order of the pages that list them."""

from __future__ import annotations

from spmdrl.algorithms.settings.actor_critic_configs import PfPpoConfig, PpoConfig
from spmdrl.algorithms.settings.algo_config import AlgoConfig
from spmdrl.algorithms.settings.distillation_configs import GkdConfig, OpdConfig
from spmdrl.algorithms.settings.policy_configs import (
    CispoConfig,
    DapoConfig,
    DppoConfig,
    DrGrpoConfig,
    GdpoConfig,
    GrpoConfig,
    GrpoPaperConfig,
    GspoConfig,
    MaxRlConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
    RlooConfig,
    SapoConfig,
)
from spmdrl.algorithms.settings.preference_configs import OnlineDpoConfig

ALGO_CONFIGS: tuple[type[AlgoConfig], ...] = (
    GrpoConfig,
    GrpoPaperConfig,
    DrGrpoConfig,
    DapoConfig,
    GspoConfig,
    GdpoConfig,
    CispoConfig,
    SapoConfig,
    DppoConfig,
    MaxRlConfig,
    PpoConfig,
    PfPpoConfig,
    RlooConfig,
    ReinforcePpConfig,
    ReinforcePpBaselineConfig,
    OnlineDpoConfig,
    OpdConfig,
    GkdConfig,
)
