"""Whole jobs on the simulated accelerator give the CPU's bits, and hold what the ledger lists.

The CPU computes with the kernels that the device uses: attention as plain products, weights that don't lie in blocks,
PyTorch's operations between products. Any access that isn't ordered behind another stream's ends a job with an error.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from tests.support import simulated_accelerator
from tests.support.jobs import ROOT, finished, metrics_of, run_job, summary_of, tiny_config, untimed, weights_digest
from tests.support.ranks import end, fork
from tests.support.simulated_accelerator.table_rows import DELTA

from spmdrl.engines.models.kernels import ops, packed, plain, prefixed
from spmdrl.engines.training.context import block_kernels
from spmdrl.observability.timeline import MemorySnapshot, read_timeline

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(bool(reason := simulated_accelerator.why_not()), reason=str(reason)),
    pytest.mark.cpu_only(reason="these tests choose the devices of their jobs"),
]

QUICKSTART = (
    str(ROOT / "configs/debug/quickstart.yaml"),
    # Wide enough for what rounds each tensor's size up, and for tensors of a few numbers, to be little.
    "model.make.hidden_size=256", "model.make.intermediate_size=768", "model.make.num_hidden_layers=2",
    "sft.max_steps=2", "sft.rows_per_step=32", "rollout.prompts_per_step=4", "rollout.num_generations=4",
    "optim.warmup_steps=0", "train.max_steps=2", "eval.max_rows=8", "reshard.swap=always", "checkpoint.interval=1",
)  # fmt: skip
SHARDED = ("resources.update.shard=2",)
SHARE = 0.01


def as_the_device_computes() -> None:
    ops.TABLE["blocked_linear"]["cpu"], ops.TABLE["linear"]["cpu"] = plain.blocked_linear, plain.linear
    for operation in ("rms_norm", "rotate", "swiglu", "exponential_sums", "minus_expected", *DELTA):
        ops.TABLE[operation]["cpu"] = getattr(plain, operation)
    ops.TABLE["packed_attention"]["cpu"] = packed.padded_attention
    ops.TABLE["prefixed_attention"]["cpu"] = prefixed.padded_prefixed_attention
    block_kernels.PADDED_KERNELS["cpu"] = block_kernels.PLAIN
    torch.backends.cuda.enable_flash_sdp(False)


def with_late_kernels() -> None:
    simulated_accelerator.install("sim").late_kernels(True)


def with_nothing_late() -> None:
    simulated_accelerator.install("sim").late_copies(False)


def with_memory(mib: int) -> None:
    device = simulated_accelerator.install("sim")
    for index in range(device.device_count()):
        device.set_memory_limit(mib << 20, index)


def killed_in_the_step_after(checkpoint: Path) -> None:
    """Kill the first rank once a checkpoint is whole, while its device has work that hasn't run."""
    device = simulated_accelerator.install("sim")
    device.late_kernels(True)

    def watch() -> None:
        while not checkpoint.exists() or device.num_queued(0) == 0:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "0":
        threading.Thread(target=watch, daemon=True).start()


def on_cpu(verb: str, *arguments: str | Path, ranks: int = 1) -> CompletedProcess[str]:
    # The same dtype and cache as on a device.
    same = ("model.dtype=float32", "rollout.kv_cache_gib=0.02")
    return finished(run_job(verb, *arguments, *same, ranks=ranks, kind="cpu", prepare=as_the_device_computes))


def on_device(
    verb: str, *arguments: str | Path, ranks: int = 1, prepare: Callable[[], None] | None = None
) -> CompletedProcess[str]:
    return finished(run_job(verb, *arguments, ranks=ranks, kind="sim", prepare=prepare))


def learnt(run: Path, step: int) -> tuple[list[dict[str, object]], str]:
    """What a job is to leave alike whatever it ran on."""
    return untimed(metrics_of(run)), weights_digest(run, step)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A few steps of it, with a reward for which it needn't have learnt anything; the device is compiled by then."""
    compiling = fork(simulated_accelerator.install, "sim")
    end(compiling, grace_seconds=300.0)
    reward = tiny_config(tmp_path_factory.mktemp("reward")).parent / "reward.py"
    return [*QUICKSTART, f"reward.functions=[{reward}:share_of_digits]"]


@pytest.fixture(scope="module")
def one_rank(quickstart: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("one") / "run"
    on_device("train", *quickstart, f"run.dir={run}")
    return run


@pytest.fixture(scope="module")
def two_ranks(quickstart: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("two") / "run"
    on_device("train", *quickstart, *SHARDED, f"run.dir={run}", ranks=2)
    return run


@pytest.mark.slow
def test_the_quickstart_learns_the_same_bits_as_on_a_cpu(quickstart: list[str], one_rank: Path, tmp_path: Path) -> None:
    on_cpu("train", *quickstart, f"run.dir={tmp_path}")
    assert learnt(one_rank, 2) == learnt(tmp_path, 2)
    assert all(step["grad_norm"] > 1e-3 for step in metrics_of(one_rank)[1:]), "nothing was learnt"


@pytest.mark.slow
def test_two_ranks_learn_the_same_bits_as_on_a_cpu(quickstart: list[str], two_ranks: Path, tmp_path: Path) -> None:
    on_cpu("train", *quickstart, *SHARDED, f"run.dir={tmp_path}", ranks=2)
    assert learnt(two_ranks, 2) == learnt(tmp_path, 2)


@pytest.mark.parametrize("job", [pytest.param("one_rank", marks=pytest.mark.slow), "two_ranks"])
def test_the_ledger_lists_what_the_allocator_holds_at_each_stages_end(job: str, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(job)
    stages = set()
    for step in metrics_of(run)[1:]:
        held = {name.split("/")[1]: value for name, value in step.items() if name.endswith("_held_gib")}
        for name, gib in held.items():
            listed = max(snapshot.held.device_bytes for snapshot in snapshots(run, int(step["step"]), name))
            assert listed == pytest.approx(gib * 2**30, rel=SHARE), (job, step["step"], name)
            stages.add(name.removesuffix("_held_gib"))
    assert stages >= {"to_generation", "generation", "start_return", "to_update", "update"}


def snapshots(run: Path, step: int, metric: str) -> list[MemorySnapshot]:
    found = read_timeline(run / "timeline").snapshots
    return [one for one in found if one.step == step and f"{one.held.stage}_held_gib" == metric]


def test_nothing_of_the_update_state_is_on_the_device_while_responses_are_generated(two_ranks: Path) -> None:
    for snapshot in snapshots(two_ranks, 2, "to_generation_held_gib"):
        held = snapshot.held
        assert (held.device["update_weights"], held.device["optimizer"], held.device["gradients"]) == (0, 0, 0)
        assert min(held.host["update_weights"], held.host["optimizer"]) > 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [with_late_kernels, with_nothing_late])
def test_a_killed_job_goes_on_to_the_same_bits_whenever_kernels_and_copies_run(
    quickstart: list[str], two_ranks: Path, tmp_path: Path, prepare: Callable[[], None]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_ranks, run)
    # As if the job had died before the last checkpoint was written.
    shutil.rmtree(run / "checkpoints/step_000002")
    job = on_device("train", *quickstart, *SHARDED, f"run.dir={run}", ranks=2, prepare=prepare)
    assert "resumed from" in job.stdout
    assert learnt(run, 2) == learnt(two_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [with_late_kernels, with_nothing_late])
def test_checkpoints_written_during_the_next_step_hold_their_own_whenever_copies_run(
    quickstart: list[str], two_ranks: Path, tmp_path: Path, prepare: Callable[[], None]
) -> None:
    settings = [*quickstart, *SHARDED, "checkpoint.asynchronous=true", f"run.dir={tmp_path}"]
    on_device("train", *settings, ranks=2, prepare=prepare)
    assert saved(tmp_path) == saved(two_ranks) and len(saved(tmp_path)) == 6


def saved(run: Path) -> dict[str, bytes]:
    """Weights and optimizer of all checkpoints."""
    root = run / "checkpoints"
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.safetensors")}


@pytest.mark.slow
def test_a_rank_killed_in_a_step_leaves_a_run_that_goes_on_to_the_same_bits(
    quickstart: list[str], two_ranks: Path, tmp_path: Path
) -> None:
    settings = [*quickstart, *SHARDED, f"run.dir={tmp_path}"]
    saved, lost = (tmp_path / "checkpoints" / name for name in ("step_000001", "step_000002"))
    job = run_job("train", *settings, ranks=2, kind="sim", prepare=partial(killed_in_the_step_after, saved))
    assert job.returncode == -signal.SIGKILL and saved.exists() and not lost.exists()
    assert "resumed from" in on_device("train", *settings, ranks=2).stdout
    assert learnt(tmp_path, 2) == learnt(two_ranks, 2)


@pytest.mark.slow
def test_state_is_swapped_where_the_device_is_too_small_for_all_of_it(
    quickstart: list[str], one_rank: Path, tmp_path: Path
) -> None:
    settings = [*quickstart, "reshard.swap=auto", f"run.dir={tmp_path}"]
    job = on_device("train", *settings, prepare=partial(with_memory, 64))
    assert "swap: at every switch, else" in job.stdout
    assert summary_of(tmp_path)["swap"]["swaps"] and learnt(tmp_path, 2) == learnt(one_rank, 2)


@pytest.mark.slow
def test_supervised_training_gives_the_same_bits_as_on_a_cpu(tmp_path: Path) -> None:
    settings = [
        tiny_config(tmp_path), *SHARDED, "sft.max_steps=2", "sft.rows_per_step=16", "reshard.swap=always",
        "data.eval=synthetic://addition?low=0&high=9&count=8&split=test",
    ]  # fmt: skip
    for run in (on_cpu, on_device):
        run("sft", *settings, f"run.dir={tmp_path / run.__name__}", ranks=2)
    found, expected = (learnt(tmp_path / run.__name__, 2) for run in (on_device, on_cpu))
    assert found == expected
    assert [step["grad_norm"] > 1e-3 for step in found[0] if "grad_norm" in step] == [True, True]


@pytest.mark.slow
def test_a_checkpoint_gives_the_same_answers_as_on_a_cpu(one_rank: Path, tmp_path: Path) -> None:
    settings = [QUICKSTART[0], f"model.path={one_rank}", "model.make=null", "eval.max_rows=8", "eval.num_samples=2"]
    answers: dict[str, list[str]] = {}
    for run in (on_cpu, on_device):
        for verb in ("eval", "generate"):
            target = tmp_path / run.__name__ / verb
            run(verb, *settings, f"run.dir={target}")
            (file,) = target.glob(f"{verb}/*/*.jsonl")
            answers.setdefault(verb, []).append(file.read_text())
    for verb, (expected, found) in answers.items():
        assert found == expected and len(found.splitlines()) >= 8, verb


@pytest.mark.slow
def test_a_job_that_the_device_has_too_little_memory_for_ends_with_what_to_lower(
    quickstart: list[str], tmp_path: Path
) -> None:
    settings = ["rollout.kv_cache_gib=0.002", "train.max_tokens_per_microbatch=100000"]
    job = run_job("train", *QUICKSTART, *settings, f"run.dir={tmp_path}", kind="sim", prepare=partial(with_memory, 8))
    assert job.returncode not in (0, 2)
    assert "needs more memory than is available: lower " in job.stderr, job.stderr[-2000:]


OTHERS = {
    "partial rollout": ("rollout.partial_max_rounds=3", "reshard.swap=always"),
    "critic": ("critic={}", "reshard.swap=always"),
    "reference and several updates": (
        "algo.kl_coef=0.01", "train.updates_per_step=2", "algo.rollout_is=tis", "reshard.swap=always",
        "resources.generation.tensor=2",
    ),
    "all-gather of verified weights": (
        "resources.update.shard=2", "reshard.executor=allgather", "reshard.verify=true", "reshard.swap=always",
    ),
    "pipeline": ("resources.update.pipeline=2", "reshard.swap=always"),
    "experts": (
        "model.make.model_type=qwen3_moe", "model.make.num_experts=4",
        "resources.update.expert=2", "reshard.swap=always",
    ),
    "context": ("resources.update.context=2", "reshard.swap=always"),
    "exact sends without a swap": ("resources.update.tensor=2", "reshard.swap=never", "reshard.verify=true"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS.keys())
def test_every_flow_gives_the_same_bits_as_on_a_cpu(settings: tuple[str, ...], tmp_path: Path) -> None:
    """A job of two ranks on the CPU, and on the device with late kernels."""
    config = tiny_config(tmp_path)
    on_cpu("train", config, *settings, f"run.dir={tmp_path / 'cpu'}", ranks=2)
    on_device("train", config, *settings, f"run.dir={tmp_path / 'sim'}", ranks=2, prepare=with_late_kernels)
    assert learnt(tmp_path / "sim", 3) == learnt(tmp_path / "cpu", 3)
