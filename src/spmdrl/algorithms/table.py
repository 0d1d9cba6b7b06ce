"""The algorithms by their configs, whose `name` is what `algo.name` chooses; adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from spmdrl.algorithms.actor_critic.pf_ppo import PfPpo, PfPpoConfig
from spmdrl.algorithms.actor_critic.ppo import Ppo, PpoConfig
from spmdrl.algorithms.algorithm import AlgoConfig, Algorithm
from spmdrl.algorithms.distillation.gkd import Gkd, GkdConfig
from spmdrl.algorithms.distillation.opd import Opd, OpdConfig
from spmdrl.algorithms.policy.cispo import Cispo, CispoConfig
from spmdrl.algorithms.policy.dapo import Dapo, DapoConfig
from spmdrl.algorithms.policy.dppo import Dppo, DppoConfig
from spmdrl.algorithms.policy.dr_grpo import DrGrpoConfig
from spmdrl.algorithms.policy.gdpo import Gdpo, GdpoConfig
from spmdrl.algorithms.policy.grpo import Grpo, GrpoConfig, GrpoPaperConfig
from spmdrl.algorithms.policy.gspo import GspoConfig
from spmdrl.algorithms.policy.maxrl import MaxRl, MaxRlConfig
from spmdrl.algorithms.policy.reinforce_pp import (
    ReinforcePp,
    ReinforcePpBaseline,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
)
from spmdrl.algorithms.policy.rloo import Rloo, RlooConfig
from spmdrl.algorithms.policy.sapo import Sapo, SapoConfig
from spmdrl.algorithms.preferences.online_dpo import OnlineDpo, OnlineDpoConfig

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
