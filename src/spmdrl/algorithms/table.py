"""The algorithms by their configs, whose `name` is what `algo.name` chooses; adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from spmdrl.algorithms.actor_critic.pf_ppo import PfPpo
from spmdrl.algorithms.actor_critic.ppo import Ppo
from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.distillation.gkd import Gkd
from spmdrl.algorithms.distillation.opd import Opd
from spmdrl.algorithms.policy.cispo import Cispo
from spmdrl.algorithms.policy.dapo import Dapo
from spmdrl.algorithms.policy.dppo import Dppo
from spmdrl.algorithms.policy.gdpo import Gdpo
from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.policy.maxrl import MaxRl
from spmdrl.algorithms.policy.reinforce_pp import ReinforcePp, ReinforcePpBaseline
from spmdrl.algorithms.policy.rloo import Rloo
from spmdrl.algorithms.policy.sapo import Sapo
from spmdrl.algorithms.preferences.online_dpo import OnlineDpo
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

ALGORITHMS: Mapping[type[AlgoConfig], type[Algorithm]] = {
    GrpoConfig: Grpo,
    GrpoPaperConfig: Grpo,
    DrGrpoConfig: Grpo,
    DapoConfig: Dapo,
    GspoConfig: Grpo,
    GdpoConfig: Gdpo,
    CispoConfig: Cispo,
    SapoConfig: Sapo,
    DppoConfig: Dppo,
    MaxRlConfig: MaxRl,
    PpoConfig: Ppo,
    PfPpoConfig: PfPpo,
    RlooConfig: Rloo,
    ReinforcePpConfig: ReinforcePp,
    ReinforcePpBaselineConfig: ReinforcePpBaseline,
    OnlineDpoConfig: OnlineDpo,
    OpdConfig: Opd,
    GkdConfig: Gkd,
}


def build_algorithm(config: AlgoConfig) -> Algorithm:
    return ALGORITHMS[type(config)](config)
