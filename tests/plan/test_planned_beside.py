from __future__ import annotations

import contextlib
import io
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tests.support.jobs import ROOT, finished, inline_config, metrics_of, run_job

from spmdrl.cli.command_line import main
from spmdrl.config.config import load_config
from spmdrl.config.reader import resolved_yaml
from spmdrl.observability.terminal.console import Console
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.verbs.planned_beside import PlanBeside

QUICKSTART = ROOT / "configs/debug/quickstart.yaml"
CONFIG = resolved_yaml(load_config([QUICKSTART], [], "train"))
# The first step ends after the plan, however fast the machine is.
REWARD = """
import time
from pathlib import Path

def share_of_digits(completions, **columns):
    while not (Path(__file__).parent / "run/plan.json").exists():
        time.sleep(0.05)
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]
"""


def device_file(folder: Path) -> Path:
    devices = yaml.safe_load((ROOT / "src/spmdrl/plan/devices.yaml").read_text())
    path = folder / "node.yaml"
    path.write_text(yaml.safe_dump(devices["h100"] | {"memory_gib": 64}))
    return path


@pytest.mark.ranks
@pytest.mark.alone
@pytest.mark.cpu_only(reason="the plan is of another device than this machine's")
def test_a_run_shows_its_plan_and_its_report_has_it_beside_what_was_measured(tmp_path):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    (tmp_path / "reward.py").write_text(REWARD)
    settings = ["train.max_steps=2", "rollout.kv_cache_gib=0.01", "reward.timeout_seconds=100", f"run.dir={folder}"]
    done = finished(run_job("train", config, *settings, "--plan", device_file(tmp_path), ranks=2))
    told = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("  plan ")]
    verdict, times = told
    assert re.fullmatch(r"fits: \d+ MiB of 64 GiB on node, in the \w+ of rank 0", verdict), verdict
    assert times.endswith(" tokens per second and device")
    assert done.stdout.index(times) < done.stdout.index("step 2/2")

    plan, measured = json.loads((folder / "plan.json").read_text()), metrics_of(folder)[-1]
    assert plan["ranks"][0]["alike"] == [0, 1] and measured["step"] == 2
    report = (folder / "report.html").read_text()
    rows = [re.findall("<td>(.*?)</td>", line) for line in re.findall("<tr>(.*?)</tr>", report)]
    for what, planned, name in (
        ("update, seconds", plan["stages"]["update"], "time/update"),
        ("step, seconds", plan["step_seconds"], "time/step"),
        ("tokens per second and device", plan["tokens_per_second_per_device"],
         "perf/eq5_tokens_per_second_per_device"),
    ):  # fmt: skip
        found = measured[name]
        assert [what, f"{planned:.4g}", f"{found:.4g}", f"{found / planned:.4g}"] in rows
    assert '<section id="plan">' in report and verdict in report


@pytest.mark.parametrize(
    ("device", "refusal"),
    [
        ("h1000", "--plan is 'h1000', but must be one of h100, h200, 910b, or a YAML file"),
        ("{memory_gib: 64", "while parsing a flow mapping"),
        ("{memory: 64}", "there is no memory"),
    ],
)
def test_a_device_that_cant_be_planned_for_is_refused_at_once(tmp_path, capsys, device, refusal):
    if device.startswith("{"):
        path = tmp_path / "node.yaml"
        path.write_text(device)
        device = str(path)
    assert main(["train", str(QUICKSTART), f"run.dir={tmp_path / 'run'}", "--plan", device]) == 2
    assert refusal in capsys.readouterr().err and not (tmp_path / "run").exists()


def plan_beside(folder: Path, config: str) -> PlanBeside:
    world = SimpleNamespace(is_main=True, size=1, launch=LaunchEnvironment())
    checked = SimpleNamespace(config=SimpleNamespace(run=SimpleNamespace(folder=folder)), resolved_config=config)
    return PlanBeside(checked, world, "h100")


def test_a_plan_that_fails_costs_one_line(tmp_path):
    screen, plan = io.StringIO(), plan_beside(tmp_path, f"{CONFIG}modle: 1\n")
    plan.show_on(Console(stream=screen))
    deadline = time.monotonic() + 60
    while not screen.getvalue() and time.monotonic() < deadline:
        time.sleep(0.05)
    plan.wait()
    plan.close()
    (line,) = screen.getvalue().splitlines()
    assert line.startswith("WARNING: the run goes on without a plan: /dev/stdin:") and "unknown key modle" in line
    assert list(tmp_path.iterdir()) == []


def processes_of(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return [words for words in found if str(folder) in words]


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_a_run_that_ends_before_its_plan_leaves_no_process(tmp_path):
    screen, plan = io.StringIO(), plan_beside(tmp_path, CONFIG)
    plan.show_on(Console(stream=screen))
    try:
        # A process that has just begun has no words for a moment.
        deadline = time.monotonic() + 10
        while len(processes_of(tmp_path)) != 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        plan.close()
    assert processes_of(tmp_path) == [] and screen.getvalue() == ""
