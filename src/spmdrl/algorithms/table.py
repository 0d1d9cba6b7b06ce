"""The algorithms by name; adding one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from spmdrl.algorithms.algo_config import AlgoConfig
from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.grpo import Grpo

ALGORITHMS: Mapping[str, type[Algorithm]] = {"grpo": Grpo}


def build_algorithm(config: AlgoConfig) -> Algorithm:
    return ALGORITHMS[config.name](config)
