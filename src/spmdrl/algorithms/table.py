"""The algorithms by their configs, whose `name` is what `algo.name` chooses; adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from spmdrl.algorithms.algorithm import AlgoConfig, Algorithm
from spmdrl.algorithms.policy.grpo import Grpo, GrpoConfig
from spmdrl.algorithms.policy.rloo import Rloo, RlooConfig

ALGORITHMS: Mapping[type[AlgoConfig], type[Algorithm]] = {
    GrpoConfig: Grpo,
    RlooConfig: Rloo,
}


def build_algorithm(config: AlgoConfig) -> Algorithm:
    return ALGORITHMS[type(config)](config)
