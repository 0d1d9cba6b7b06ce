"""A run's own figures in the paper's equations."""

from __future__ import annotations

from spmdrl.algorithms.table import build_algorithm
from spmdrl.config.config import load_config
from spmdrl.job.rollouts.samples_report import estimates_of
from spmdrl.job.start.checked_run import states_of


def test_the_estimates_are_those_of_the_runs_sizes_and_states():
    overrides = [
        "model.make={}", "data.train=synthetic://addition?count=10", "data.max_prompt_length=2048",
        "rollout.prompts_per_step=256", "rollout.max_completion_length=8192", "algo.kl_coef=0.1",
    ]  # fmt: skip
    config = load_config([], overrides).value
    estimates = estimates_of(config, states_of(config, build_algorithm(config.algo)), num_warehouses=4)
    # Response ids, rollout log-probs, versions, reference log-probs, advantages.
    assert estimates["num_response_items"] == 5 and estimates["num_controllers"] == 5
    rows, scalars = 256 * config.rollout.num_generations, estimates["num_scalars"]
    responses = 3 * 5 * 8192
    assert estimates["eq1_gib"] == rows * 4 * (2048 + 5 * 8192 + scalars) / 2**30
    assert estimates["eq2_gib"] == rows * 4 * (2 * 2048 + responses + 8 * scalars) / 2**30
    assert estimates["eq4_gib"] == rows * 4 * (2 * 2048 + responses + 8 * 6 * scalars) / 2**30 / 4
