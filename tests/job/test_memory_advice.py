"""Running out of memory ends a run with one line that names the stage and the keys to lower."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.support.jobs import run_job, tiny_config

from spmdrl.algorithms.table import build_algorithm
from spmdrl.config.config import load_config
from spmdrl.dataflow.samples.store.shared_memory import Pool, host_pool
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_failure import OutOfMemory, explained_memory, recording_failure
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.settings.role_configs import JudgeConfig
from spmdrl.observability.timeline import HeldMemory
from spmdrl.resources.device import Device
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.memory import is_out_of_memory
from spmdrl.resources.world import World
from spmdrl.runtime.launch import read_launch_environment

CONFIG = load_config([], ["model.make={}", "data.train=synthetic://addition?count=10"]).value
TOO_LARGE = 1 << 50


class Where:
    """A run whose memory ran out in this stage."""

    def __init__(self, stage: str | None):
        held = HeldMemory("generation", {"policy_weights": 3 << 20, "kv_cache": 5 << 20}, {}, {}, 0)
        self.timeline = SimpleNamespace(failed_stage=stage, held=held)
        self.lower_limit = lambda: "; then with 64"


def fill_torch() -> None:
    torch.empty(TOO_LARGE)


def fill_numpy() -> None:
    np.empty(TOO_LARGE)


def fill_python() -> None:
    bytearray(TOO_LARGE << 10)


@pytest.mark.parametrize("fill", [fill_torch, fill_numpy, fill_python])
@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("generation", "stage generation .*lower rollout.gpu_memory_utilization .0.6. or rollout.max_running_rows"),
        ("update", "stage update .*lower train.max_tokens_per_microbatch .auto., set train.activation_checkpointing"),
        ("resharding", "stage resharding .* shard the training state over more ranks .resources.update.shard"),
        (None, "setting up the run needs more .* or use a smaller model"),
    ],
)
def test_each_allocators_failure_names_the_stage_and_the_keys(fill, stage, words):
    with (
        pytest.raises(OutOfMemory, match=words) as caught,
        explained_memory(CONFIG, Where(stage)),
    ):
        fill()
    text = str(caught.value)
    assert "\n" not in text and "it held kv_cache 5.0 MiB, policy_weights 3.0 MiB" in text
    assert ("; then with 64" in text) == (stage == "update")


def test_the_devices_own_error_is_recognised():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; ...)"))


def test_a_judge_without_memory_is_to_have_a_smaller_cache():
    judge = JudgeConfig(path="judge", kv_cache_gib=8.0)
    with (
        pytest.raises(OutOfMemory, match=r"stage judge .*lower reward.judge.kv_cache_gib \(8.0\)"),
        explained_memory(replace(CONFIG, reward=replace(CONFIG.reward, judge=judge)), Where("judge")),
    ):
        fill_torch()


def test_a_verb_that_only_generates_names_its_cache():
    words = "stage generation .*lower rollout.gpu_memory_utilization"
    with pytest.raises(OutOfMemory, match=words), explained_memory(CONFIG):
        fill_torch()


def test_other_errors_and_full_buffers_of_our_own_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shape"), explained_memory(CONFIG, Where("update")):
        torch.ones(2).view(3)
    host = host_pool(1, 1)
    with pytest.raises(MemoryError) as caught, explained_memory(CONFIG, Where("update")):
        Pool(host.address, 0).allocate(1 << 20)
    assert not is_out_of_memory(caught.value)


def test_a_run_without_memory_for_its_models_names_the_set_up(tmp_path):
    config = replace(CONFIG, run=replace(CONFIG.run, dir=str(tmp_path / "run")))
    checked = CheckedRun("train", config, "", UpdateLayout(), build_algorithm(config.algo), {}, [], [], "a model")
    run = Run(checked, World(read_launch_environment({}), Device("cpu")))
    with pytest.raises(OutOfMemory, match="setting up the run needs more"), recording_failure(run):
        fill_torch()
    assert not run.folder.exists()


def test_a_job_without_memory_ends_with_one_line(tmp_path):
    run = tmp_path / "run"
    job = run_job("train", tiny_config(tmp_path), f"run.dir={run}", "rollout.kv_cache_gib=100000000", timeout=120)
    assert job.returncode == 1, job.stdout + job.stderr
    assert "Traceback" not in job.stderr
    assert job.stderr.count("OutOfMemory: stage resharding needs more memory than is available") == 1, job.stderr
    assert "lower rollout.kv_cache_gib (100000000.0)" in job.stderr
