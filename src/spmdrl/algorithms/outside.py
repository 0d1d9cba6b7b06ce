"""Algorithms outside the package: `algo.name: my.py:Raft` or `pkg.mod:Raft`, a class derived from `Algorithm`."""

from __future__ import annotations

import inspect
from dataclasses import make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from spmdrl.algorithms.settings.algo_config import AlgoConfig
from spmdrl.algorithms.settings.choices import ALGO_CONFIGS
from spmdrl.runtime.workers.loading import explain, load_attribute

if TYPE_CHECKING:
    from spmdrl.algorithms.algorithm import Algorithm


@cache
def load_algorithm(spec: str) -> type[Algorithm]:
    """Return the class that `algo.name` names. Raises ValueError unless it can be loaded and is a whole algorithm."""
    # It imports PyTorch, which reading a built-in algorithm's config doesn't need.
    from spmdrl.algorithms.algorithm import Algorithm

    found = load_attribute(spec, "algo.name", [vars(config)["name"] for config in ALGO_CONFIGS], "class")
    if not issubclass(found, Algorithm):
        raise ValueError(
            f"algo.name: '{spec}' is no algorithm; derive it from spmdrl.algorithms.algorithm.Algorithm, or from an "
            "algorithm that differs little"
        )
    if inspect.isabstract(found):
        raise ValueError(f"algo.name: '{spec}' lacks {', '.join(sorted(found.__abstractmethods__))}; define them")
    return found


@cache
def outside_config(spec: str) -> type[AlgoConfig]:
    """Return the settings of the class that `algo.name` names, under that name. Raises ValueError if it has none."""
    algorithm = load_algorithm(spec)
    try:
        settings: Any = get_type_hints(algorithm)["config"]
    except Exception as error:
        raise ValueError(f"algo.name: the annotations of '{spec}' can't be read: {explain(error)}") from error
    # A class that isn't decorated would have its base's keys alone.
    if not issubclass(settings, AlgoConfig) or "__dataclass_params__" not in vars(settings):
        raise ValueError(
            f"algo.name: '{spec}' has a `config` of type {settings.__name__}; annotate it with a class derived from "
            "spmdrl.algorithms.settings.algo_config.AlgoConfig, decorated with @dataclass(frozen=True)"
        )
    named: Any = make_dataclass(settings.__name__, [("name", Literal[spec], spec)], bases=(settings,), frozen=True)
    named.__doc__ = settings.__doc__
    return named
