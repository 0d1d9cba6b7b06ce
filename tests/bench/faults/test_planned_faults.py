"""Faults on purpose come where the variable says, once, and nowhere without it."""

from __future__ import annotations

import signal

import pytest
import torch

from spmdrl.engines.training.checkpoints.manifest import step_of_folder
from spmdrl.observability.fault_points import faultpoint
from spmdrl.runtime.supervision.stop_request import STOPPED
from tests.bench.faults.fault_jobs import FaultJobs, difference, outcome_of
from tests.bench.faults.planned_faults import VARIABLE, arm_fault, parse_fault


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    arm_fault({})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("forwrd:0:1:raise", "'forwrd' is no stage; did you mean forward"),
        ("forward:0:1:enospc", "forward has no fault 'enospc'; it has sigkill, .*oom, nan"),
        ("forward:2:1:raise", "the rank one of this job's 0 to 1"),
        ("forward:0:first:raise", "must be whole numbers"),
        ("forward:0:1:raise:often", "'often' isn't a number"),
        ("forward:0:1:raise:1:2", "write SPMDRL_FAULT=stage:rank:step:kind"),
        ("forward", "forward has no fault ''"),
    ],
)
def test_a_wrong_fault_is_refused_with_what_there_is(text, answer):
    with pytest.raises(ValueError, match=answer):
        parse_fault(text, world_size=2)


def test_nothing_is_armed_without_the_variable_on_another_rank_or_after_a_restart(capsys):
    arm_fault({})
    assert capsys.readouterr().err == ""
    arm_fault({VARIABLE: "forward:1:0:raise", "RANK": "0", "WORLD_SIZE": "2"})
    assert "SPMDRL_FAULT is set: raise at forward in step 0 of rank 1" in capsys.readouterr().err
    faultpoint("forward")
    second_try = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    arm_fault({VARIABLE: "forward:1:0:raise"} | second_try)
    faultpoint("forward")


def test_a_fault_comes_once_at_its_point_in_its_step():
    arm_fault({VARIABLE: "forward:0:2:raise:1"})
    for step in (1, 2):
        faultpoint("step", step)
        faultpoint("backward")
        faultpoint("forward")
    with pytest.raises(RuntimeError, match="on purpose"):
        faultpoint("forward")
    faultpoint("forward")


def test_values_are_spoilt_in_place_and_files_by_a_bit(tmp_path):
    values, path = torch.ones(3, requires_grad=True) * 2, tmp_path / "file"
    path.write_bytes(b"abc")
    arm_fault({VARIABLE: "forward:0:0:nan"})
    faultpoint("forward", values)
    assert values.isnan().tolist() == [True, False, False]
    arm_fault({VARIABLE: "reshard:0:0:corrupt"})
    faultpoint("reshard", whole := torch.ones(4), path)
    assert whole.ne(1).sum() == 1 and whole.isfinite().all() and path.read_bytes() == b"acc"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Jobs of one process, and what one comes to that nothing disturbs."""
    jobs = FaultJobs(tmp_path_factory.mktemp("jobs"), 1, "reward.isolation=inline")
    assert jobs.run("whole").is_done
    return jobs, outcome_of(jobs.root / "whole")


@pytest.mark.parametrize(
    ("fault", "code", "saved"),
    [
        pytest.param("init:0:0:raise", 1, 0, marks=pytest.mark.slow),
        pytest.param("reshard:0:2:exit", 1, 1, marks=pytest.mark.slow),
        ("dock.get:0:2:sigkill", -signal.SIGKILL, 1),
        ("eval:0:2:raise", 1, 1),
        pytest.param("shutdown:0:3:exit", 1, 3, marks=pytest.mark.slow),
        # The update is finished, then saved.
        ("forward:0:1:sigterm", STOPPED, 1),
    ],
)
def test_a_fault_at_any_point_ends_the_job_and_the_same_command_goes_on(jobs, fault, code, saved):
    jobs, whole = jobs
    name = fault.replace(":", "_")
    end = jobs.run(name, fault=fault)
    assert end.codes == [code] and "comes now" in end.screen, end.screen
    folders = (jobs.root / name / "checkpoints").glob("step_*")
    assert max((step_of_folder(path.name) for path in folders), default=0) == saved
    again = jobs.run(name)
    assert again.is_done, again.screen
    assert difference(whole, outcome_of(jobs.root / name)) is None
