"""A run's folder as a real run leaves it, of any size, written with the product's own writers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from spmdrl.observability.jsonl import JsonlWriter
from spmdrl.observability.log import CHECKPOINTS_FILE, MetricsLog, SampleRecord, SamplesLog, SampleToken
from spmdrl.observability.summary import write_summary
from spmdrl.observability.timeline import timeline_file
from spmdrl.observability.timeline_lines import HeldMemory, LineWriter, Moved, Span

STAGES = {"resharding": 0.4, "generation": 5.0, "reward": 0.3, "old_logprobs": 0.6, "advantage": 0.05, "update": 1.9}
HOSTILE = (
    "</script><script>alert(1)</script> \"quoted\" 'single' <b>&amp; \u2028 \ud800 "
    "<img src=http://x/y onerror=alert(2)>"
)
CONFIG = """model:
  path: models/tiny  # configs/debug/quickstart.yaml:2
optim:
  lr: 1.0e-06  # default
run:
  name: "<i>run</i>"  # command line
"""
GIB = 1024**3


def write_run(run_dir: Path, *, num_steps: int, num_ranks: int, samples_per_step: int = 8, seed: int = 0) -> Path:
    """Write metrics, samples, timelines, the configuration and the summary of a made-up run."""
    chance = random.Random(seed)
    log, samples = MetricsLog(run_dir, ["jsonl"]), SamplesLog(run_dir)
    for step in range(1, num_steps + 1):
        log.write(step, _metrics(step, num_steps, chance))
        samples.write(_sample(step, row, chance) for row in range(samples_per_step))
    log.close()
    samples.close()
    for rank in range(num_ranks):
        _write_timeline(timeline_file(run_dir, rank), rank, num_steps, chance)
    (run_dir / "config.resolved.yaml").write_text(CONFIG)
    checkpoints = JsonlWriter(run_dir / CHECKPOINTS_FILE)
    for step in sorted({*range(10, num_steps + 1, 10), num_steps}):
        checkpoints.write({"step": step, "seconds": 0.8, "bytes": 12e6, "folder": f"step_{step:06d}", "error": None})
    checkpoints.close()
    write_summary(
        run_dir,
        verdict="ok",
        steps=num_steps,
        reward_first=0.21,
        reward_last=0.93,
        accuracy_before=0.24,
        accuracy_before_interval=[0.2, 0.29],
        accuracy_after=0.91,
        accuracy_after_interval=[0.88, 0.94],
        seconds=192.4,
        devices=f"{num_ranks} x cpu",
        versions={"python": "3.11.7", "torch": "2.13.0", "spmdrl": "0.1.0"},
        checkpoint=run_dir / "checkpoints" / f"step_{num_steps:06d}" / "model",
        report=run_dir / "report.html",
        sample_flow={"num_prompts": 4, "num_warehouses": 2, "eq1_gib": 0.001, "eq2_gib": 0.003, "eq4_gib": 0.0015},
    )
    return run_dir


def _metrics(step: int, num_steps: int, chance: random.Random) -> dict[str, float]:
    progress = step / num_steps
    metrics = {
        "reward": 0.2 + 0.7 * (1 - math.exp(-3 * progress)) + chance.gauss(0, 0.03),
        "reward_std": 0.35 - 0.2 * progress,
        "reward_p10": 0.1 * progress,
        "reward_p90": 0.4 + 0.6 * progress,
        "rewards/exact/mean": 0.2 + 0.6 * progress,
        "frac_reward_zero_std": 0.1 + 0.6 * progress,
        "completions/mean_length": 40 + 8 * math.sin(6 * progress) + chance.gauss(0, 1),
        "completions/clipped_ratio": 0.1 * (1 - progress),
        "entropy": 1.2 * math.exp(-2 * progress) + 0.1,
        "kl": 0.02 * progress,
        "mismatch/abs_mean": 2e-7 * chance.uniform(0.8, 1.2),
        "mismatch/abs_max": 2e-6 * chance.uniform(0.8, 1.2),
        "off_policy/mean": 0.25,
        "off_policy/lag_0": 900.0,
        "off_policy/lag_1": 300.0,
        "loss": chance.gauss(0, 0.01),
        "grad_norm": chance.lognormvariate(-1, 0.4),
        "lr": 1e-6 * min(1.0, step / 10),
        "clip_ratio/high_mean": 0.01 * chance.random(),
        "perf/tokens_per_second": 14_200 * chance.uniform(0.9, 1.1),
        "dock/bytes_process": 1e6 * chance.uniform(0.9, 1.1),
        "dock/bytes_node": 4e5 * chance.uniform(0.9, 1.1),
        "dock/bytes_cross_node": 2e4,
        "dock/put_bytes/response_ids/process": 6e5,
        "dock/get_bytes/response_ids/node": 4e5,
        "dock/get_bytes/advantages/cross_node": 2e4,
        "dock/metadata_bytes": 512.0,
        "reshard/bytes": 3.9e6,
        "reshard/cross_node_bytes": 1.3e6,
        "reshard/seconds": 0.1 * chance.uniform(0.9, 1.3),
        "reshard/gb_per_second": 4.2 * chance.uniform(0.9, 1.1),
        "reshard/to_host_gb_per_second": 21 * chance.uniform(0.9, 1.1),
        "reshard/from_host_gb_per_second": 24 * chance.uniform(0.9, 1.1),
        "reshard/swapped_bytes": 24e9,
        "dock/dropped": 0.0,
        "reward/errors/timeout": float(step % 23 == 0),
        **{f"time/{stage}": seconds * chance.uniform(0.9, 1.2) for stage, seconds in STAGES.items()},
    }
    metrics["time/step"] = sum(value for name, value in metrics.items() if name.startswith("time/"))
    if step % 10 == 0 or step == 1:
        metrics |= {"eval/accuracy": 0.2 + 0.7 * progress}
        metrics |= {"eval/accuracy_low": 0.15 + 0.7 * progress, "eval/accuracy_high": 0.25 + 0.7 * progress}
    return metrics


def _sample(step: int, row: int, chance: random.Random) -> SampleRecord:
    right = chance.random() < 0.5
    response = HOSTILE if row == 0 else f"12 + {row} is\n" + "so we think again, " * chance.randint(1, 40)
    return SampleRecord(
        step=step, row=row, prompt=f"What is 12 + {row}?", response=response, answer=str(12 + row),
        reward=float(right), parts={"exact": float(right), "format": 0.5}, verdict="scored" if right else "wrong",
        advantage=chance.gauss(0, 1), mismatch=2e-7, version=step - 1,
        tokens=[SampleToken(text, chance.gauss(0, 1), 2e-7) for text in response[:200].split(" ")],
    )  # fmt: skip


def _write_timeline(path: Path, rank: int, num_steps: int, chance: random.Random) -> None:
    # Lines are written directly: a timeline of hours can't be lived through.
    path.parent.mkdir(parents=True, exist_ok=True)
    now = 1.7e9
    writer = LineWriter(rank, now)
    lines = [writer.header]
    for step in range(1, num_steps + 1):
        begin = now
        for stage, seconds in STAGES.items():
            start, now = now, now + seconds * chance.uniform(0.8, 1.1) * (3 if step % 37 == 5 else 1)
            moved = _moved(rank) if stage == "resharding" else ()
            lines.append(writer.span(Span(rank, step, stage, start, now, moved=moved)))
            memory, host = _memory(stage)
            peaks = memory | ({"update_weights": 4 * GIB, "bucket": GIB} if stage == "resharding" else {})
            peak = sum(memory.values()) + peaks.get("bucket", 0)
            lines.append(writer.memory(step, now, HeldMemory(stage, memory, host, peaks, peak)))
        now = max(now, begin + sum(STAGES.values()) * 1.1 * (3 if step % 37 == 5 else 1))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _moved(rank: int) -> tuple[Moved, ...]:
    """Each rank is slower than the one before."""
    slow = 0.2 + 0.2 * rank
    return Moved("cross_node", GIB, slow), Moved("node", 2 * GIB, slow), Moved("to_host", 12 * GIB, 0.4)


def _memory(stage: str) -> tuple[dict[str, int], dict[str, int]]:
    updating = {"update_weights": 4 * GIB, "gradients": 4 * GIB, "optimizer": 8 * GIB}
    generating = {"generation_weights": 8 * GIB, "kv_cache": 12 * GIB}
    if stage in ("resharding", "generation", "reward"):
        return generating | dict.fromkeys(updating, 0), {name: held for name, held in updating.items() if held}
    return updating | dict.fromkeys(generating, 0), {}
