"""Whole jobs of the command line, as users start them, on a model and data small enough for tests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, get_args

from torch.distributed import TCPStore

from spmdrl.resources.device import DeviceKind
from tests.bench.faults.planned_faults import arm_fault
from tests.support.chosen_device import VARIABLE, Uses, chosen_kind, install_chosen, races_found, skip_without_devices
from tests.support.ranks import HOST, end, fork, rank_environment

ROOT = Path(__file__).parents[2]

TINY = """
model:
  make: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1,
    intermediate_size: 64, max_position_embeddings: 32,
         chars: "0123456789+= "}
data:
  train: synthetic://addition?low=0&high=9&count=40
rollout: {prompts_per_step: 8, num_generations: 4, max_completion_length: 8}
reward: {functions: ["REWARD_FILE:share_of_digits"], isolation: ISOLATION}
optim: {lr: 1.0e-3}
train: {max_steps: 3}
eval: {before_train: false}
checkpoint: {interval: 0}
"""


# Elsewhere than on a CPU: its dtype, and a cache that takes little of the device.
ON_DEVICES = ("model.dtype=float32", "rollout.kv_cache_gib=0.02")
_RUNNING_MODELS = ("train", "sft", "preferences", "reward-model", "eval", "generate")

# One rank sums up gradients as two do, to the bit: an update has two rows, each a micro-batch, and two gradients have
# one order. Ranks hold whole weights, over which the norm is one sum, and a row's log-probs depend on no other row.
IN_ONE_ORDER = (
    "rollout.prompts_per_step=8", "rollout.num_generations=2", "train.updates_per_step=8",
    "train.max_tokens_per_microbatch=1", "resources.update={data: 0, shard: 1}", "debug.batch_invariant=true",
)  # fmt: skip

# A model that was never trained gets some of it, so that every step has gradients.
REWARD = """
def share_of_digits(completions, **columns):
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]
"""


def torchrun_script(folder: Path, *program: str) -> list[str]:
    """The command of launch/torchrun.sh; `program`, written to `folder`, runs another one than the command line."""
    script = ROOT / "launch/torchrun.sh"
    if program:
        text = script.read_text().replace("-m spmdrl ", f"{shlex.join(program)} ")
        script = folder / "torchrun.sh"
        script.write_text(text)
    return ["bash", str(script)]


def tiny_config(folder: Path, isolation: str = "auto") -> Path:
    """Write a small job's config, and return its path."""
    reward, path = folder / "reward.py", folder / "tiny.yaml"
    reward.write_text(REWARD)
    path.write_text(TINY.replace("REWARD_FILE", str(reward)).replace("ISOLATION", isolation))
    return path


def inline_config(folder: Path) -> Path:
    """As `tiny_config`, for jobs whose rewards aren't looked at: without two processes per rank, a third of a job."""
    return tiny_config(folder, "inline")


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without a launcher's variables, so that jobs started from it are their own.

    Nor with the interface that a world of this process chose: it is loopback, by which nodes don't reach each other.
    """
    others = re.compile("RANK|WORLD_SIZE|LOCAL_RANK|MS_ROLE|SLURM_.*|(GLOO|TP|NCCL)_SOCKET_IFNAME")
    inherited = {name: value for name, value in os.environ.items() if not others.fullmatch(name)}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | extra


def job_command(verb: str, *arguments: str | Path, ranks: int = 1) -> list[str]:
    skip_without_devices(ranks)
    Uses.count += 1
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher += ["-m"]
    if chosen_kind() not in get_args(DeviceKind):
        launcher += ["tests.support.simulated_accelerator", "--name", chosen_kind()]
    return [*launcher, "spmdrl", *_arguments(chosen_kind(), verb, *arguments)]


def _arguments(kind: str, verb: str, *arguments: str | Path) -> list[str]:
    on_device = ON_DEVICES if kind != "cpu" and verb in _RUNNING_MODELS else ()
    # Those that learn of pairs generate nothing.
    on_device = on_device[:1] if verb in ("preferences", "reward-model") else on_device
    return [verb, *on_device, *map(str, arguments)]


def launch_job(
    verb: str, *arguments: str | Path, ranks: int = 1, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end, started as users start it."""
    command = job_command(verb, *arguments, ranks=ranks)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment(), cwd=ROOT, check=False
    )


def run_job(
    verb: str,
    *arguments: str | Path,
    ranks: int = 1,
    timeout: float = 120,
    only_on: Mapping[int, Sequence[str]] | None = None,
    kind: str | None = None,
    prepare: Callable[[], object] | None = None,
    ranks_per_node: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """As `launch_job`, in forked processes: without the seconds in which Python and torchrun start.

    `only_on` holds further arguments of single ranks. The device is of the tests' kind, or of `kind`; `prepare`, which
    must be importable, is called in each process before the job. With `ranks_per_node` ranks believe to be on several
    nodes.
    """
    if kind is None:
        skip_without_devices(ranks)
        Uses.count += 1
    kind = kind or chosen_kind()
    command = _arguments(kind, verb, *arguments)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    per_node = ranks_per_node or ranks
    launched = [rank_environment(rank, ranks, per_node, store.port) for rank in range(ranks)] if ranks > 1 else [{}]
    launched = [own | {VARIABLE: kind} for own in launched]
    with tempfile.TemporaryDirectory() as folder:
        screens = [Path(folder) / "stdout", Path(folder) / "stderr"]
        processes = [
            fork(be_job, environment(**own), screens, [*command, *(only_on or {}).get(rank, ())], prepare)
            for rank, own in enumerate(launched)
        ]
        code = _code_of_all(processes, time.monotonic() + timeout)
        return subprocess.CompletedProcess(command, code, *(screen.read_text() for screen in screens))


def begin_job(verb: str, *arguments: str | Path) -> BaseProcess:
    """Start a verb on one rank as `run_job` does, without waiting for its end and without what it prints."""
    Uses.count += 1
    own, nowhere = environment(**{VARIABLE: chosen_kind()}), [Path(os.devnull)] * 2
    return fork(be_job, own, nowhere, _arguments(chosen_kind(), verb, *arguments), None)


def be_job(
    own: dict[str, str], screens: Sequence[Path], command: list[str], prepare: Callable[[], object] | None
) -> None:
    """Do in this process what `python -m spmdrl` does in its own; `screens` are of its stdout and stderr."""
    for number, screen in enumerate(screens, 1):
        file = os.open(screen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(own)
    os.chdir(ROOT)
    # What a run's summary has as its command.
    sys.orig_argv = [sys.executable, "-m", "spmdrl", *command]
    from spmdrl.cli.command_line import main

    install_chosen()
    arm_fault(os.environ)
    if prepare is not None:
        prepare()
    code = main(command)
    if races := races_found():
        raise SystemExit("\n".join(races))
    raise SystemExit(code)


def _code_of_all(processes: Sequence[BaseProcess], deadline: float) -> int:
    """The exit code of the first process that fails, which ends the others as torchrun does, or 0."""
    running = {process.sentinel: process for process in processes}
    code = 0
    try:
        while running and not code:
            ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ended:
                raise TimeoutError(f"{len(running)} of {len(processes)} ranks did not finish in time")
            for sentinel in ended:
                process = running.pop(sentinel)
                process.join()
                code = code or process.exitcode or 0
    finally:
        for process in running.values():
            process.terminate()
        for process in processes:
            end(process, grace_seconds=10.0)
    return code


def finished(job: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    return job


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what a clock or the operating system measured."""
    clocked = re.compile(
        "(time|perf|checkpoint|mem|fusion)/|(reshard|environment)/.*(seconds|per_second|hidden_share)$"
    )
    return [
        {name: value for name, value in step.items() if not clocked.match(name) or name == "perf/tokens"}
        for step in metrics
    ]


def memory_at_ends(folder: Path) -> dict[str, dict[str, int]]:
    """By boundary of the last step, the bytes of rank 0 by place and owner; d: device, o: host, p: peaks."""
    held, at_end_of = dict[str, int](), {}
    for line in (folder / "timeline/rank_00000.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "h" in record:
            # Only what changed since the boundary before is written.
            held |= {f"{place} {owner}": size for place in "dop" for owner, size in record.get(place, {}).items()}
            at_end_of[record["h"][0]] = dict(held)
    return at_end_of


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def weights_digest(folder: Path, step: int) -> str:
    """The sha256 of the weights in a checkpoint."""
    path = folder / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()
