"""Table of the algorithms that `algo.name` chooses among, with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_type_hints

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.outside import load_algorithm
from spmdrl.algorithms.policy.cispo import Cispo
from spmdrl.algorithms.policy.dapo import Dapo
from spmdrl.algorithms.policy.dppo import Dppo
from spmdrl.algorithms.policy.gdpo import Gdpo
from spmdrl.algorithms.policy.gkd import Gkd
from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.policy.maxrl import MaxRl
from spmdrl.algorithms.policy.online_dpo import OnlineDpo
from spmdrl.algorithms.policy.opd import Opd
from spmdrl.algorithms.policy.pf_ppo import PfPpo
from spmdrl.algorithms.policy.ppo import Ppo
from spmdrl.algorithms.policy.reinforce_pp import ReinforcePp, ReinforcePpBaseline
from spmdrl.algorithms.policy.rloo import Rloo
from spmdrl.algorithms.policy.sapo import Sapo
from spmdrl.algorithms.settings.algo_config import AlgoConfig
from spmdrl.algorithms.settings.choices import ALGO_CONFIGS

_BY_SETTINGS: Mapping[type, type[Algorithm]] = {
    get_type_hints(algorithm)["config"]: algorithm
    for algorithm in (
        *(Grpo, Dapo, Gdpo, Cispo, Sapo, Dppo, MaxRl, Ppo, PfPpo, Rloo, ReinforcePp, ReinforcePpBaseline),
        *(OnlineDpo, Opd, Gkd),
    )
}
# Settings that differ only in their values use the algorithm of their base class.
ALGORITHMS: Mapping[type[AlgoConfig], type[Algorithm]] = {
    config: next(_BY_SETTINGS[base] for base in config.__mro__ if base in _BY_SETTINGS) for config in ALGO_CONFIGS
}


def build_algorithm(config: AlgoConfig) -> Algorithm:
    return (ALGORITHMS.get(type(config)) or load_algorithm(config.name))(config)
