"""The table of algorithms is what `algo.name` chooses from."""

from __future__ import annotations

import pytest

from spmdrl.algorithms.settings.choices import ALGO_CONFIGS
from spmdrl.algorithms.table import ALGORITHMS, build_algorithm
from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError

MODEL = ["model.make={}", "data.train=synthetic://addition?count=10"]
NAMES = {config().name: config for config in ALGORITHMS}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_chooses_its_config_with_its_own_defaults_and_its_algorithm(name):
    chosen = load_config([], [*MODEL, f"algo.name={name}"]).value.algo
    assert chosen == NAMES[name]()
    algorithm = build_algorithm(chosen)
    assert type(algorithm) is ALGORITHMS[type(chosen)] and algorithm.config is chosen
    assert load_config([], [*MODEL, f"algo.name={name}", "algo.kl_coef=0.5"]).value.algo.kl_coef == 0.5


def test_every_choice_has_its_algorithm():
    assert list(ALGORITHMS) == list(ALGO_CONFIGS)


def test_without_a_name_it_is_grpo():
    assert load_config([], MODEL).value.algo == NAMES["grpo"]()


def test_an_unknown_name_is_refused_with_those_that_are_there():
    with pytest.raises(ConfigError) as refusal:
        load_config([], [*MODEL, "algo.name=reinforced"])
    assert len(NAMES) == len(ALGORITHMS) and all(name in str(refusal.value) for name in NAMES)
