"""`plan --calibrate`: runs small jobs on this machine and writes a device file with the rates that explain their times.

The jobs are of random models of several sizes on all given ranks at once. What is planned for them, and how long their
worker states then take, gives the rates.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from spmdrl.config.config import Config, load_config
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.plan.device_profile import CROSS_NODE, DOCK, HOST, NODE, DeviceProfile, LinkRate, read_profile
from spmdrl.plan.rank_plan import SWITCH
from spmdrl.plan.rate_fit import TimedPart, fit_rates
from spmdrl.plan.run_plan import Plan, plan_run
from spmdrl.plan.slot_times import kind_of
from spmdrl.resources.host_memory import free_host_bytes
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.screen import show, waiting
from spmdrl.verbs.doctor.commands import train_to_end
from spmdrl.verbs.planned_run import planned_run

_PROMPT_LENGTH = 6
_STEPS, _WARM_UP_STEPS = 6, 2
_LONGEST_SECONDS = 900
# Rows of one length: sums of two numbers of two digits, and responses that end at the limit.
_SETTINGS = (
    "model.make.max_position_embeddings=1024", "data.train=synthetic://addition?low=10&high=49&count=400",
    "data.max_prompt_length=64", "rollout.ignore_eos=true", "rollout.num_generations=8", "rollout.kv_cache_gib=0.5",
    "reward.functions=[exact]", "algo.kl_coef=0.01", "train.skip_zero_advantage=false", f"train.max_steps={_STEPS}",
    "optim.warmup_steps=0", "checkpoint.interval=0", "log.backends=[jsonl]", "log.samples_per_step=0",
)  # fmt: skip


@dataclass(frozen=True)
class CalibrationJob:
    """Sizes of a job."""

    hidden_size: int
    num_layers: int
    prompts_per_rank: int
    response_length: int
    sharded: bool
    """true if the ranks share out the training state"""
    swap: bool
    tensor: bool = False
    """true if pairs of ranks share out the model in generation"""

    def settings(self, num_ranks: int) -> list[str]:
        data, shard = (1, num_ranks) if self.sharded else (num_ranks, 1)
        tensor = 2 if self.tensor and num_ranks % 2 == 0 else 1
        return [
            *_SETTINGS, f"model.make.hidden_size={self.hidden_size}", f"model.make.num_hidden_layers={self.num_layers}",
            f"model.make.intermediate_size={4 * self.hidden_size}", f"resources.update.data={data}",
            f"resources.update.shard={shard}", f"resources.generation.tensor={tensor}",
            f"rollout.prompts_per_step={self.prompts_per_rank * num_ranks}",
            f"rollout.max_completion_length={self.response_length}",
            f"reshard.swap={'always' if self.swap else 'never'}",
        ]  # fmt: skip


_JOBS = {
    "cpu": (
        CalibrationJob(128, 2, 8, 16, sharded=False, swap=False),
        CalibrationJob(128, 8, 16, 24, sharded=True, swap=False),
        CalibrationJob(256, 4, 8, 32, sharded=False, swap=True, tensor=True),
        CalibrationJob(256, 8, 16, 16, sharded=True, swap=False),
        CalibrationJob(512, 2, 16, 24, sharded=False, swap=False, tensor=True),
        CalibrationJob(512, 4, 8, 16, sharded=True, swap=True),
    ),
    "accelerator": (
        CalibrationJob(1024, 4, 16, 64, sharded=False, swap=False),
        CalibrationJob(1024, 16, 32, 128, sharded=True, swap=False),
        CalibrationJob(2048, 8, 32, 512, sharded=False, swap=True, tensor=True),
        CalibrationJob(2048, 16, 16, 256, sharded=True, swap=False),
        CalibrationJob(4096, 4, 32, 256, sharded=False, swap=False, tensor=True),
        CalibrationJob(4096, 8, 16, 512, sharded=True, swap=True),
    ),
}


def calibrate(config: Config, family: str, num_ranks: int, file: Path) -> int:
    """Run the jobs on so many ranks here, in the config's dtype, and write the device file. Returns 0.

    `family` is the model's type; one that can't be made is replaced by Qwen3, dense or sparse.
    """
    if family not in get_args(get_type_hints(MakeConfig)["model_type"]):
        family = "qwen3_moe" if "moe" in family else "qwen3"
    kind = "accelerator" if config.resources.device != "cpu" and torch.accelerator.is_available() else "cpu"
    settings = [
        f"model.make.model_type={family}", f"model.dtype={config.model.dtype}",
        f"resources.device={'cpu' if kind == 'cpu' else config.resources.device}", "rollout.engine=native",
    ]  # fmt: skip
    parts: list[TimedPart] = []
    hosts: list[float] = []
    jobs = _JOBS[kind]
    for number, job in enumerate(jobs, 1):
        with waiting(f"calibrating: job {number} of {len(jobs)}"), tempfile.TemporaryDirectory() as folder:
            words = [*job.settings(num_ranks), *settings]
            plan = _planned(words, num_ranks)
            steps = train_to_end(words, num_ranks, Path(folder) / "run", _LONGEST_SECONDS)[_WARM_UP_STEPS:]
        parts += timed_parts(plan, steps)
        hosts += [
            rate for step in steps if job.swap for name, rate in step.items() if name.endswith("host_gb_per_second")
        ]  # fmt: skip
    links = read_profile("h100").links
    assert links is not None
    rates, node = fit_rates(parts, links)
    host = LinkRate(round(statistics.median(hosts) * 1e9 / (1 << 30), 3))
    found = DeviceProfile(file.stem, _memory_gib(kind, num_ranks), "cuda", False, rates, {
        NODE: node, CROSS_NODE: node, HOST: host, DOCK: LinkRate(node.gib_per_second)
    })  # fmt: skip
    found.write(file, _head(kind, num_ranks))
    for one in rates:
        errors = [abs(part.error(rates, found.links or {}, num_ranks)) for part in parts if part.kind == one]
        show(
            f"{one}: off by {statistics.mean(errors):.0%} on average, at most {max(errors):.0%}, of {len(errors)} jobs"
        )
    show(f"wrote {file}; plan with --device {file}")
    return 0


def timed_parts(plan: Plan, steps: list[dict[str, float]]) -> Iterator[TimedPart]:
    """Yield the worker states of a plan with their fastest times: what else the machine does only adds to them."""
    for slot in plan.ranks[0].slots:
        if slot.span is None or slot.name == SWITCH:
            continue
        seconds = min(step[f"time/{slot.name}"] for step in steps)
        messages = Counter({sent: count * slot.num_repeats for sent, count in slot.span.messages.items()})
        yield TimedPart(kind_of(slot), slot.num_repeats * slot.span.work, messages, seconds)


def _planned(words: list[str], num_ranks: int) -> Plan:
    launch = LaunchEnvironment(0, num_ranks, 0, num_ranks)
    run = planned_run(load_config([], words, "train"), launch, "h200", _PROMPT_LENGTH, None, None)
    return plan_run(run)


def _memory_gib(kind: str, num_ranks: int) -> float:
    """Return a device's memory; of a CPU, a rank's share of what is free."""
    if kind == "cpu":
        return round(free_host_bytes() / num_ranks / (1 << 30), 1)
    return round(torch.accelerator.memory.get_memory_info()[1] / (1 << 30), 1)


def _head(kind: str, num_ranks: int) -> str:
    return (
        f"Measured on {num_ranks} ranks of one machine ({kind}) by spmdrl plan --calibrate. Nothing crossed nodes: "
        "cross_node and dock\n# are the node's rates, to be put right by hand. 1000000: no part depended on it."
        + ("" if num_ranks > 1 else " One rank sends nothing:\n# the node's rates are an H100's.")
    )
