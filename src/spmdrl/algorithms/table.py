"""The algorithms by name; adding one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable

from spmdrl.algorithms.algorithm import AlgoConfig, Algorithm
from spmdrl.algorithms.grpo import Grpo

ALGORITHMS: dict[str, Callable[[AlgoConfig], Algorithm]] = {"grpo": Grpo}


def build_algorithm(config: AlgoConfig) -> Algorithm:
    return ALGORITHMS[config.name](config)
