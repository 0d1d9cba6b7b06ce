"""The stages of the accelerator check find nothing wrong on a CPU, and find what is planted."""

from __future__ import annotations

import importlib
import multiprocessing
from pathlib import Path

import pytest
import torch

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.resources.world import World, open_world
from spmdrl.verbs.doctor.doctor import Stage
from spmdrl.verbs.doctor.stage_run import StageRun, StageVerdict
from tests.bench.accelerator import kernel_parity
from tests.bench.accelerator.accelerator_bench import STAGES, beside_goals
from tests.bench.accelerator.kernel_parity import check_kernels, relative_error
from tests.support import simulated_accelerator
from tests.support.ranks import run_ranks

ON_CPU = {stage.name: stage for stage in STAGES if not stage.starts_jobs and stage.skipped_on({"kind": "cpu"}) is None}
ON_RANKS = ("device", "ring_attention", "bfloat16")


def run_of(world: World, stage: Stage, folder: Path) -> StageRun:
    run = StageRun(world.device.kind, "small", world.size, folder, world)
    module, _, function = stage.function.partition(":")
    getattr(importlib.import_module(module), function)(run)
    return run


@pytest.mark.parametrize("name", ON_CPU)
def test_a_stage_finds_nothing_wrong_on_a_cpu(name: str, tmp_path):
    with open_world("cpu") as world:
        run = run_of(world, ON_CPU[name], tmp_path)
    assert run.faults == [] and run.figures


@pytest.mark.ranks
def test_stages_of_ranks_find_nothing_wrong_on_two(tmp_path):
    for figures, faults in run_ranks(2, _figures_and_faults, tmp_path):
        assert faults == []
        assert figures["all_reduce_gb_per_second"] > 0


def _figures_and_faults(world: World, folder: Path) -> tuple[dict, list[str]]:
    runs = [run_of(world, ON_CPU[name], folder) for name in ON_RANKS]
    return {**runs[0].figures, **runs[1].figures}, [fault for run in runs for fault in run.faults]


def test_a_wrong_kernel_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(ops.TABLE["swiglu"], "cpu", lambda gate, up: plain.swiglu(gate, up) * 1.01)
    with open_world("cpu") as world:
        run = StageRun("cpu", "small", 1, tmp_path, world)
        check_kernels(run)
    assert len(run.faults) == 1 and "swiglu in float32 is off by 1" in run.faults[0]


def test_every_operation_of_the_kernel_table_is_checked():
    # Packed weights are the CPU's only.
    assert {*kernel_parity.cases(64, 64), *kernel_parity.FORWARD_ONLY, "blocked_linear"} == set(ops.TABLE)


def test_what_is_not_finite_is_infinitely_wrong():
    assert relative_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    assert relative_error(torch.tensor([2.0, 4.0]), torch.tensor([2.0, 5.0])) == pytest.approx(0.2)


@pytest.mark.slow
@pytest.mark.ranks
def test_stages_of_accelerators_find_nothing_wrong_on_the_simulated_one(tmp_path):
    if reason := simulated_accelerator.why_not():
        pytest.skip(reason)
    names = [stage.name for stage in STAGES if not stage.starts_jobs and not stage.only_on_cuda]
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        found = pool.apply(_on_simulated_one, (names, tmp_path))
    assert list(found) == names
    assert {name: faults for name, (faults, _) in found.items() if faults} == {}
    assert found["switch_peak"][1]["peak_of_larger_state"] < 1.2
    assert found["ledger"][1]["largest_difference"] < 0.01


def _on_simulated_one(names: list[str], folder: Path) -> dict[str, tuple[list[str], dict]]:
    """Faults and figures by stage; a race ends the process's stage with its own error."""
    module = simulated_accelerator.install()
    stages = {stage.name: stage for stage in STAGES}
    with open_world("sim") as world:
        runs = {name: run_of(world, stages[name], folder) for name in names}
    assert module.races() == []
    return {name: (run.faults, run.figures) for name, run in runs.items()}


def test_a_figure_below_its_goal_is_shown_with_a_remedy_and_fails_nothing():
    slow, fast = (beside_goals(StageVerdict("update", "passed", "", {"share_of_large_product": it})) for it in (0.3, 1))
    assert slow.verdict == "passed"
    assert slow.reason.startswith("below goal: share_of_large_product is 0.30, not 0.45 or more: raise train.max")
    assert fast.reason == ""
