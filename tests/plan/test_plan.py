from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from tests.bench.harness.bench_models import qwen3
from tests.support import simulated_accelerator
from tests.support.jobs import ROOT, environment, run_job
from tests.support.ranks import run_ranks

from spmdrl.cli.command_line import take_plan
from spmdrl.config.reader import ConfigError
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.observability.report.plan_section import plan_svg
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World

MODEL = qwen3(
    vocab_size=512, hidden_size=128, intermediate_size=512, num_layers=3, num_heads=4, num_kv_heads=2, head_size=32,
    max_positions=64,
)  # fmt: skip
QUICKSTART = str(ROOT / "configs/debug/quickstart.yaml")


def mean_logprob(scores: Scores, micro: MicroBatch) -> LossTerms:
    return LossTerms(-scores.logprobs_R.mean(), {})


def update(world: World, dtype: torch.dtype, *, recompute: bool, optim: str) -> None:
    """Two micro-batches and an optimizer step over all ranks' shards."""
    mesh = build_update_mesh(UpdateLayout(data=1, shard=world.size), world.device, world.rank)
    training = TrainingConfig(
        max_tokens_per_microbatch=512, activation_checkpointing="full" if recompute else "none"
    )  # fmt: skip
    engine = TrainingEngine(MODEL, training, OptimConfig(name=optim), mesh, world.device, compute_dtype=dtype)
    tokens_T = ((torch.arange(16)[:, None] * 17 + torch.arange(64)) % 512).flatten()
    rows = TokenRows(tokens_T, offsets_of([64] * 16), torch.full((16,), 32))
    assert engine.update(rows, mean_logprob).num_microbatches == 2


def on_device(world: World, dtype: torch.dtype, recompute: bool, optim: str) -> int:
    world.device.synchronize()
    world.device.take_peak_bytes()
    update(world, dtype, recompute=recompute, optim=optim)
    world.device.synchronize()
    return world.device.take_peak_bytes()


def as_planned(dtype: torch.dtype, num_ranks: int, *, recompute: bool, optim: str) -> int:
    # The device stays in the process that it was made in.
    from tests.support.simulated_accelerator.table_rows import fill_tables

    from spmdrl.plan.account import Account
    from spmdrl.plan.planned_device import alone_in, planned_device
    from spmdrl.plan.planned_kernels import take_kernels_of
    from spmdrl.runtime.launch import LaunchEnvironment

    fill_tables("sim", "simccl")
    take_kernels_of("sim")
    account = Account()
    launch = LaunchEnvironment(0, num_ranks, 0, num_ranks)
    with alone_in(launch) as world, planned_device(account), account.span(lambda owner: False) as span:
        update(world, dtype, recompute=recompute, optim=optim)
    return span.owners.total()


def as_planned_beside(world: World, dtype: torch.dtype, num_ranks: int, recompute: bool, optim: str) -> int:
    torch.distributed.destroy_process_group()
    try:
        return as_planned(dtype, num_ranks, recompute=recompute, optim=optim)
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@pytest.mark.ranks
@pytest.mark.skipif(simulated_accelerator.why_not() is not None, reason=str(simulated_accelerator.why_not()))
@pytest.mark.cpu_only(reason="this test chooses its devices")
@pytest.mark.parametrize(
    ("dtype", "num_ranks", "recompute", "optim"),
    [
        pytest.param(torch.float32, 1, False, "adamw", id="float32"),
        pytest.param(torch.bfloat16, 2, True, "adamw", id="bfloat16, shards of two, recomputed"),
        pytest.param(torch.bfloat16, 2, True, "muon", id="the same by Muon", marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_an_update_without_memory_is_that_of_an_allocator(dtype, num_ranks, recompute, optim):
    measured = run_ranks(num_ranks, on_device, dtype, recompute, optim, device="sim", timeout=600)
    (planned,) = run_ranks(1, as_planned_beside, dtype, num_ranks, recompute, optim, timeout=120)
    assert planned == pytest.approx(max(measured), rel=0.01), (planned, measured)


def plan_of(folder: Path, memory_gib: float, *settings: str) -> tuple[CompletedProcess[str], dict]:
    """The plan of the quickstart on two devices, without its data."""
    profile, file = folder / "tiny.yaml", folder / "plan.json"
    profile.write_text(f"{{memory_gib: {memory_gib}, kernels: cuda}}\n")
    arguments = [QUICKSTART, "--ranks", "2", "--device", str(profile), "--json", str(file)]
    arguments += ["--picture", str(file.with_suffix(".svg"))]
    done = run_job("plan", *arguments, "data.train=nowhere.jsonl", "rollout.kv_cache_gib=0.01", *settings)
    return done, json.loads(file.read_text())


@pytest.mark.ranks
def test_a_plan_says_what_a_run_needs(tmp_path):
    done, plan = plan_of(tmp_path, 1.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fits: ") and "in the update of rank 0" in done.stdout
    assert plan["fits"] and plan["device_bytes"] == 2**30
    (rank,) = plan["ranks"]
    assert rank["alike"] == [0, 1]
    owners = rank["slots"]["update"]
    assert owners["optimizer"] == 2 * owners["update_weights"] > 0
    assert owners["activations"] > owners["optimizer"]
    assert rank["slots"]["generation"]["kv_cache"] == pytest.approx(0.01 * 2**30, rel=0.01)
    assert plan["bytes_by_link"]["switch"]["node"] > 0 == plan["bytes_by_link"]["switch"]["cross_node"]
    assert (tmp_path / "plan.svg").read_text() == plan_svg(plan)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_does_not_fit_is_told_the_change_by_which_it_does(tmp_path):
    done, plan = plan_of(tmp_path, 0.11)
    assert (done.returncode, plan["fits"]) == (1, False), done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("fits with ")]
    assert told == "fits with train.max_tokens_per_microbatch=4096"
    changed, plan = plan_of(tmp_path, 0.11, told.removeprefix("fits with "))
    assert (changed.returncode, plan["fits"]) == (0, True), changed.stdout


@pytest.mark.ranks
@pytest.mark.slow
def test_a_proposed_change_is_the_smallest_one_by_dry_runs(tmp_path):
    file = tmp_path / "unfit.json"
    cases = ["update, rank sets", "cache refused, and update"]
    command = [sys.executable, "-m", "tests.bench", "unfit", "--only", *cases, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    proposed = {row["config"]: row["fits with"] for row in json.loads(file.read_text())["rows"]}
    assert proposed == {
        "update, rank sets": "train.max_tokens_per_microbatch=512",
        "cache refused, and update": "rollout.gpu_memory_utilization=0.9 train.max_tokens_per_microbatch=64",
    }


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_a_dry_run_of_every_pass_needs_what_the_plan_of_some_says(tmp_path, schedule, chunks):
    file = tmp_path / "dry.json"
    # Large enough for the numbers that every micro-batch reports to be little.
    sizes = ["model.make.hidden_size=1024", "model.make.intermediate_size=4096", "train.max_tokens_per_microbatch=512"]
    layout = ["resources.update.pipeline=2", "resources.update.tensor=2"]
    layout += [f"resources.update.pipeline_schedule={schedule}", f"resources.update.pipeline_chunks={chunks}"]
    arguments = [QUICKSTART, "--dry-run", "--ranks", "4", "--rank", "3", "--json", str(file), *layout, *sizes]
    done = run_job("train", *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    (whole,), (planned,) = found["ranks"], found["planned"]
    for state, owners in whole["slots"].items():
        assert sum(owners.values()) == pytest.approx(sum(planned["slots"][state].values()), rel=0.01), state
    # The last stage receives hidden states and sends their gradients; halves of matrices are gathered and summed.
    assert {name.split()[0] for name in found["messages"]["update"]} >= {"send", "_allgather_base_"}
    # Three products of two operations for each weight of this rank and at least each token of the responses.
    tokens, weights = 64 * 8 * 6, planned["slots"]["update"]["update_weights"] // 4
    assert found["work"]["update"]["flops"] > 6 * tokens * weights
    # The plan ran a few micro-batches of many, and counted the others: too few by parts of idle ones' operators.
    for state, work in found["work"].items():
        assert list(work.values()) == pytest.approx(list(found["planned_work"][state].values()), rel=0.005), state
        sent = {name: list(sums.values()) for name, sums in found["messages"][state].items()}
        planned = {name: list(sums.values()) for name, sums in found["planned_messages"][state].items()}
        assert sent.keys() == planned.keys()
        for name, sums in sent.items():
            assert sums == pytest.approx(planned[name], rel=0.001), (state, name)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dry-run", "--rank", "x"], "--rank is 'x'"),
        (["--ranks", "6", "--nodes", "4"], "isn't a multiple"),
        (["--device"], "--device has no value"),
        (["--prompt-length", "0"], "must be a whole number"),
        (["--calibrate", "here.yaml", "--search"], "--search is of a plan"),
        (["--calibrate", "here.yaml", "--response-length", "5"], "--response-length is of a plan"),
    ],
)
def test_flags_are_refused_by_name(arguments, says):
    with pytest.raises(ConfigError, match=says):
        take_plan(arguments)
