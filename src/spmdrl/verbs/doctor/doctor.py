"""The verb `doctor`: a verdict on each capability that a job needs, to run first on a new machine.

Stages run in turn, each in processes of its own with a time limit, on all devices of this node. The others still run if
one fails or crashes. A passed stage isn't run again, unless the code, the versions or the sizes changed.
docs/accelerators.md explains each stage.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import spmdrl
from spmdrl.config.reader import ConfigError
from spmdrl.runtime.screen import output_file, show
from spmdrl.verbs.doctor.commands import CommandFailed, ranks_command, run_to_end
from spmdrl.verbs.doctor.stage_run import CheckReport, RankOutcome, Scale, StageVerdict, verdict_of

_DOCTOR = "spmdrl.verbs.doctor"


@dataclass(frozen=True)
class Stage:
    """One stage. Without reasons to skip it runs on every kind of device."""

    name: str
    function: str
    """module:function; the function takes a `StageRun`"""
    shows: str
    """guarantee of a passed stage"""
    starts_jobs: bool = False
    """true if it starts whole jobs, rather than being a rank itself"""
    not_on_cpu: str | None = None
    """reason for skipping it there"""
    only_on_cuda: str | None = None
    """reason for skipping it elsewhere"""
    limit_seconds: float = 480.0
    package: str | None = None
    """required package, by its name on the package index"""

    def skipped_on(self, device: Mapping[str, Any]) -> str | None:
        """Return the reason against running on a device with these facts; None if it can."""
        if device["kind"] == "cpu" and self.not_on_cpu:
            return self.not_on_cpu
        if device["kind"] != "cuda" and self.only_on_cuda:
            return self.only_on_cuda
        if self.package is not None and self.package.replace("-", "_") not in device:
            return f"{self.package} is not installed"
        return None


STAGES = (
    Stage("device", f"{_DOCTOR}.device_verbs:check_device", "memory, streams, pinned copies and collectives work"),
    Stage("bfloat16", f"{_DOCTOR}.precision:check_bfloat16", "an update is the CPU's, and in bfloat16 that in float32"),
    Stage(
        "quickstart", f"{_DOCTOR}.whole_jobs:check_quickstart", "a job learns, twice to the same bits", starts_jobs=True
    ),
    Stage(
        "vllm",
        f"{_DOCTOR}.whole_jobs:check_vllm",
        "vLLM sleeps, wakes and takes weights in the job's processes, and rates tokens as the trainer does",
        starts_jobs=True,
        package="vllm",
    ),
)


_ASKING_SECONDS = 300.0
# Kinds of device measured at full sizes.
_FULL_KINDS = ("cuda", "npu")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class Check:
    """Settings of the stages."""

    device: Mapping[str, Any]
    """facts of the device, from `device_facts`"""
    scale: Scale
    num_ranks: int
    folder: Path
    """folder of verdicts and logs"""
    again: bool = False
    """run passed stages, too"""

    def conditions(self, stage: Stage) -> dict[str, Any]:
        """Return the conditions that the stage's verdict depends on."""
        return {
            "device": dict(self.device),
            "scale": self.scale,
            "num_ranks": self.num_ranks,
            "code": _digest_of_code(stage),
        }


def main(argv: Sequence[str]) -> int:
    """Run the verb. Returns 0 if no stage failed, else 1. Raises ConfigError as `run` does."""
    page, layout = (__doc__ or "").strip(), argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="spmdrl doctor", description=page, formatter_class=layout)
    add_arguments(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the verdicts to FILE")
    arguments = parser.parse_args(argv)
    report = run(arguments)
    report.print(sys.stdout)
    if arguments.json is not None:
        arguments.json.write_text(report.to_json())
    return 0 if report.passed else 1


def add_arguments(parser: argparse.ArgumentParser, stages: Sequence[Stage] = STAGES) -> None:
    """Declare the options of a check of these stages."""
    names = [stage.name for stage in stages]
    # Not `choices`, which argparse applies to an empty list too.
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or npu")
    parser.add_argument("--nproc", type=int, help="ranks of this node; by default one per device, on a CPU 1")
    parser.add_argument("--small", action="store_true", help="sizes of a CPU on an accelerator too")
    parser.add_argument("--again", action="store_true", help="also run stages that have passed")
    parser.add_argument("--folder", type=Path, help="of verdicts and logs; by default in runs/doctor")


def run(arguments: argparse.Namespace, stages: Sequence[Stage] = STAGES) -> CheckReport:
    """Run the stages that the arguments name. Raises ConfigError for a wrong stage, device or number of ranks."""
    stages = chosen_stages(arguments.stages, stages)
    device = _facts(arguments.device)
    kind, count = device["kind"], device["count"]
    num_ranks = count if arguments.nproc is None else arguments.nproc
    if num_ranks < 1:
        raise ConfigError(f"--nproc is {num_ranks}, but a check needs a rank; give at least 1")
    if kind != "cpu" and num_ranks > count:
        raise ConfigError(f"--nproc is {num_ranks}, but this node has {count} {kind} devices; give at most {count}")
    folder = arguments.folder or Path("runs", "doctor", f"{device['host']}-{kind}")
    check = Check(device, scale_on(kind, small=arguments.small), num_ranks, folder.absolute(), again=arguments.again)
    return run_stages(stages, check)


def scale_on(kind: str, *, small: bool) -> Scale:
    """Return full sizes for the kinds of device that are meant for them."""
    return "full" if kind in _FULL_KINDS and not small else "small"


def chosen_stages(names: Sequence[str], stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages of these names, in the order of the table; all if there are none."""
    unknown = sorted(set(names) - {stage.name for stage in stages})
    if unknown:
        raise ConfigError(f"no stage is named {unknown[0]}; there are {', '.join(stage.name for stage in stages)}")
    return [stage for stage in stages if not names or stage.name in names]


def run_stages(stages: Sequence[Stage], check: Check) -> CheckReport:
    """Run stages that haven't passed yet, and store the verdicts of all."""
    check.folder.mkdir(parents=True, exist_ok=True)
    show(f"verdicts and logs are kept in {check.folder}", stream=sys.stderr)
    verdicts = []
    for stage in stages:
        verdict = None if check.again else _passed_before(stage, check)
        how = "passed before" if verdict is not None else ""
        if verdict is None:
            show(f"{stage.name} ...", stream=sys.stderr)
            verdict = _run_stage(stage, check)
            content = {"conditions": check.conditions(stage), "verdict": asdict(verdict)}
            (check.folder / f"{verdict.stage}.json").write_text(json.dumps(content, indent=1) + "\n")
            how = verdict.verdict + (f": {verdict.reason}" if verdict.reason else "")
        show(f"{stage.name}: {how}", stream=sys.stderr)
        verdicts.append(verdict)
    ranks = f"{check.num_ranks} rank{'s' * (check.num_ranks > 1)}"
    note = f"{ranks}, {check.scale} sizes; verdicts and logs are in {check.folder}"
    report = CheckReport(check.device, verdicts, (note,))
    (check.folder / "doctor.json").write_text(report.to_json())
    (check.folder / "doctor.md").write_text(report.to_markdown())
    return report


def _run_stage(stage: Stage, check: Check) -> StageVerdict:
    """Run one stage in processes of its own. Any outcome becomes a verdict."""
    skipped = stage.skipped_on(check.device)
    if skipped is not None:
        return StageVerdict(stage.name, "skipped", skipped)
    crash, log, started = None, "", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spmdrl-doctor-") as folder:
        try:
            run_to_end(_command(stage, check, Path(folder)), _OFFLINE, stage.limit_seconds)
        except CommandFailed as failed:
            crash, log = _how_it_ended(failed), failed.log
        paths = sorted(Path(folder).glob("rank_*.json"), key=lambda path: int(path.stem.removeprefix("rank_")))
        outcomes = [RankOutcome.read(path) for path in paths]
    (check.folder / f"{stage.name}.log").write_text(log)
    return verdict_of(stage.name, outcomes, crash=crash, seconds=time.monotonic() - started)


def _command(stage: Stage, check: Check, out: Path) -> list[str]:
    launcher = ranks_command(1 if stage.starts_jobs else check.num_ranks)
    words = ["--kind", check.device["kind"], "--scale", check.scale, "--ranks", str(check.num_ranks), "--out", str(out)]
    jobs = ["--starts-jobs"] if stage.starts_jobs else []
    return [*launcher, "-m", "spmdrl.verbs.doctor.stage_process", stage.function, *words, *jobs]


def _how_it_ended(failed: CommandFailed) -> str:
    """Describe the end in one line, with the log's last one, which mostly names the cause."""
    lines = [line.strip() for line in failed.log.splitlines() if line.strip()]
    if failed.how.startswith("nothing"):
        return f"ended, as there was {failed.how}"
    return f"its process ended with {failed.how}" + (f": {lines[-1]}" if lines else "")


def _passed_before(stage: Stage, check: Check) -> StageVerdict | None:
    path = check.folder / f"{stage.name}.json"
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    if kept["conditions"] != check.conditions(stage) or kept["verdict"]["verdict"] != "passed":
        return None
    return StageVerdict(**kept["verdict"])


def _facts(wanted: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "spmdrl.verbs.doctor.device_facts", wanted]
    try:
        facts: dict[str, Any] = json.loads(run_to_end(command, {}, _ASKING_SECONDS).splitlines()[-1])
    except CommandFailed as failed:
        raise ConfigError(
            _how_it_ended(failed) if failed.how != "2" else failed.log.strip().splitlines()[-1]
        ) from failed
    return facts


def _digest_of_code(stage: Stage) -> str:
    """Return a digest of the stage's module and the whole package: a verdict holds for this code only."""
    digest = hashlib.sha256()
    own = importlib.util.find_spec(stage.function.partition(":")[0])
    assert own is not None and own.origin is not None, stage
    for path in [Path(own.origin), *sorted(Path(next(iter(spmdrl.__path__))).rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()
