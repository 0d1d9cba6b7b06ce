"""Results that a planned device knows by their arguments, beside those that PyTorch's fake tensors find each time."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from tests.bench.plan.plan_cases import CASES, LENGTHS

from spmdrl.config.config import load_config
from spmdrl.plan.account import Account
from spmdrl.plan.planned_device import _KnownResults
from spmdrl.plan.planned_kernels import take_kernels_of
from spmdrl.plan.rank_plan import RankPlan, trace_rank
from spmdrl.plan.run_plan import PlannedRun, plan_run
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.verbs.planned_run import planned_run

FAST = {"latent, tensor", "hybrid, recomputed", "moe, expert"}
SLOW = {"windows, shard", "dense, critic, swap", "dense, pipeline 2 x tensor 2", "moe, adapters", "dense, bfloat16"}


def run_of(name: str) -> PlannedRun:
    (case,) = [one for one in CASES if one.name == name]
    launch = LaunchEnvironment(0, case.num_ranks, 0, case.num_ranks)
    file, *settings = case.settings
    loaded = load_config([Path(file)], settings, "train")
    return planned_run(loaded, launch, "h100", LENGTHS.prompt, LENGTHS.response, None)


def both_ways(name: str) -> tuple[list[RankPlan], list[RankPlan]]:
    run = run_of(name)
    known = plan_run(run).ranks
    _KnownResults.of = lambda *_: (False, None)  # type: ignore[method-assign]
    return known, plan_run(run).ranks


def shares_found(name: str) -> float:
    """The share of operators whose results fake tensors had to find."""
    found, ran = list[object](), list[object]()
    keep, note = _KnownResults.keep, Account.ran
    _KnownResults.keep = lambda self, *given: found.append(keep(self, *given))  # type: ignore[method-assign]
    Account.ran = lambda self, *given: ran.append(note(self, *given))  # type: ignore[method-assign]
    run = run_of(name)
    take_kernels_of(run.device.kernels)
    trace_rank(run.checked, run.sources, run.of_rank(0), run.lengths, more_passes=1)
    return len(found) / len(ran)


def in_a_process(function, name):
    # Kernels of a planned device stay in their place for the life of a process.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, name).result()


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*sorted(FAST), *(pytest.param(one, marks=pytest.mark.slow) for one in sorted(SLOW))])
def test_plans_by_known_results_are_those_by_fake_tensors(name):
    known, found = in_a_process(both_ways, name)
    assert known == found


@pytest.mark.ranks
def test_few_results_have_to_be_found():
    assert in_a_process(shares_found, "moe, expert") < 0.2
