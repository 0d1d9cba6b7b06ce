"""The scripts that start a run under Slurm and msrun, and the verb that fills them in."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.cli.command_line import main
from spmdrl.config.reader import ConfigError
from spmdrl.verbs.launching.job_script import SYSTEMS, Job, job_script
from tests.support.jobs import ROOT, environment, tiny_config, torchrun_script

SCRIPTS = ROOT / "src/spmdrl/verbs/launching"
STANDINS = {
    # As the batch shell of a job of two nodes meets them.
    "scontrol": 'case "$1" in show) printf "n7\\nn8\\n";; *) echo "scontrol $*" >> calls; exit ${REFUSED:-0};; esac',
    "scancel": 'echo "scancel $*" >> calls',
    "srun": 'echo "srun $*" >> calls; [ -z "${STOP:-}" ] || { mkdir -p "$STOP" && touch "$STOP/stopped"; }; '
    "exit ${STEP_CODE:-0}",
}


def fake_programs(folder: Path) -> str:
    for name, body in STANDINS.items():
        program = folder / name
        program.write_text(f"#!/usr/bin/env bash\n{body}\n")
        program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def run_script(
    folder: Path, script: str, *arguments: str, **extra: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    """What a batch script does in a job of two nodes whose programs are stand-ins, and the calls of these."""
    own = {"SLURM_JOB_ID": "30017", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_CPUS_ON_NODE": "8"}
    own |= {"SLURM_SUBMIT_DIR": str(folder), "PATH": fake_programs(folder), "SCRATCH": str(folder / "scratch")} | extra
    (folder / "calls").unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", "-c", script, "slurm.sbatch", *arguments],
        env=environment(**own), cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    calls = folder / "calls"
    return done, calls.read_text() if calls.exists() else ""


def script_of(system: str) -> str:
    return (SCRIPTS / SYSTEMS[system]).read_text()


def job(system: str, *options: str) -> Job:
    return Job(system, "train", ("run.yaml", "run.name=a b"), 2, 4, name="a b", options=options)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_filled_in_script_differs_from_the_plain_one_by_its_settings_alone(system):
    plain, filled = script_of(system).splitlines(), job_script(job(system), {}).splitlines()
    assert (
        filled.pop(1)
        == f"# Filled in by: spmdrl launch {system} train run.yaml 'run.name=a b' --nodes 2 --ranks-per-node 4"
    )
    differing = [line for line, own in zip(filled, plain, strict=True) if line != own]
    assert len(differing) >= 6 and all(re.match(r"[A-Z_]+=|#SBATCH --(nodes|job-name)=", line) for line in differing)
    assert "ARGUMENTS=(train run.yaml 'run.name=a b')" in differing
    # Nothing is left to the environment that the script would be run in.
    assert not re.search(r"^[A-Z_]+=\$\{", "\n".join(filled), re.MULTILINE)


def test_settings_come_from_the_environment_and_options_take_their_places():
    script = job_script(
        job("slurm", "--time=1:00", "--output=x.log"), {"SCRATCH": "/local disk", "RANKS_PER_NODE": "9"}
    )
    lines = script.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --job-name='a b'", "#SBATCH --output=x.log", "#SBATCH --time=1:00"} <= {
        *lines
    }
    assert not [line for line in lines if line.startswith("#SBATCH --output=%x")]
    assert lines.index("#SBATCH --time=1:00") < lines.index("set -uo pipefail")
    assert f"PYTHON={sys.executable}  " in script and "SCRATCH='/local disk'  " in script
    assert "RANKS_PER_NODE=4  " in script


@pytest.mark.parametrize("filled", [False, True])
def test_the_filled_in_script_starts_what_the_plain_one_starts(tmp_path, filled):
    words = ["train", "run.yaml", "run.name=a b"]
    script = job_script(job("slurm"), {"SCRATCH": str(tmp_path / "scratch")}) if filled else script_of("slurm")
    arguments = {} if filled else {"RANKS_PER_NODE": "4", "PYTHON": sys.executable}
    done, calls = run_script(tmp_path, script, *([] if filled else words), **arguments)
    assert done.returncode == 0, done.stderr
    started = calls[calls.index(sys.executable) :].splitlines()[0]
    assert started == (
        f"{sys.executable} --nnodes 2 --rdzv-endpoint n7:20017 --rdzv-id 30017.0 --nproc-per-node 4 "
        "-m spmdrl train run.yaml run.name=a b"
    )


@pytest.mark.parametrize(
    ("variables", "code", "requeued", "words"),
    [
        ({}, 0, False, ""),
        ({"STEP_CODE": "1"}, 1, False, ""),
        ({"STEP_CODE": "74"}, 74, False, ""),
        ({"STOP": "1"}, 75, True, "stopped and saved; requeued"),
        ({"STOP": "1", "REFUSED": "1"}, 75, True, "refuses to requeue, so unless RequeueExit has 75, submit"),
        ({"STOP": "1", "MAX_REQUEUES": "3", "SLURM_RESTART_COUNT": "3"}, 1, False, "MAX_REQUEUES is 3"),
    ],
)
def test_a_job_is_requeued_where_its_ranks_have_stopped_and_only_there(tmp_path, variables, code, requeued, words):
    script = script_of("slurm")
    if "STOP" in variables:
        # Where the step of the first node leaves a file.
        variables = variables | {"STOP": str(tmp_path / "scratch" / f"spmdrl-{os.getuid()}-30017-0")}
    done, calls = run_script(tmp_path, script, "train", "run.yaml", PYTHON=sys.executable, **variables)
    assert done.returncode == code and words in done.stdout, done.stdout + done.stderr
    assert ("scontrol requeue 30017" in calls) == requeued


def test_a_file_of_commands_comes_before_the_ranks(tmp_path):
    setup = tmp_path / "setup.sh"
    setup.write_text('export NCCL_SOCKET_IFNAME=${UNSET_HERE}ib0; echo "set up" >&2\n')
    script = job_script(job("slurm"), {"SETUP": str(setup), "SCRATCH": str(tmp_path / "scratch")})
    done, _ = run_script(tmp_path, script.replace("srun --", "echo $NCCL_SOCKET_IFNAME; srun --"))
    assert (done.returncode, done.stderr) == (0, "set up\n") and "ib0\n" in done.stdout
    setup.write_text("false\n")
    done, calls = run_script(tmp_path, script)
    assert done.returncode == 2 and "which fails" in done.stdout and not calls


@pytest.mark.parametrize("control", ["\n", "\r", "\x1b", "\x85", "\u2028", "\udcff"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_with_a_control_character_gets_into_a_script(system, control):
    word = f"run.dir=a{control}touch pwned"
    for bad in (Job(system, "train", (word,), 1, 1, name="a"), Job(system, "train", ("x",), 1, 1, name=word)):
        with pytest.raises(ConfigError, match="control character"):
            job_script(bad, {})


def test_options_are_in_the_line_by_which_a_script_is_filled_in_again():
    line = job_script(job("slurm", "--time=1:00", "--constraint=a|b"), {}).splitlines()[1]
    assert line.endswith("--nodes 2 --ranks-per-node 4 --sbatch=--time=1:00 '--sbatch=--constraint=a|b'")


def test_a_job_without_a_limit_or_devices_is_said_to_take_the_partitions_own(tmp_path, capsys):
    arguments = ["launch", "slurm", str(tiny_config(tmp_path)), "--ranks-per-node=2", "--dry-run"]
    assert main(arguments) == 0 and "no --gpus-per-node and no --time" in capsys.readouterr().err
    assert main([*arguments, "--sbatch=--gres=gpu:2"]) == 0 and "launch: no --time, so" in capsys.readouterr().err
    assert main([*arguments, "--sbatch=--gres=gpu:2", "--sbatch=--time=1"]) == 0 and not capsys.readouterr().err


def test_the_verb_checks_the_config_and_prints_the_script(tmp_path, capsys):
    config = tiny_config(tmp_path)
    words = ["sft", str(config), "sft.max_steps=1"]
    assert main(["launch", "slurm", *words, "--nodes", "2", "--ranks-per-node=2", "--dry-run"]) == 0
    assert f"\nARGUMENTS=({shlex.join(words)})\n" in capsys.readouterr().out
    planned = [str(config), "--plan", "h100"]
    assert main(["launch", "slurm", "--ranks-per-node=2", "--dry-run", *planned]) == 0
    assert f"\nARGUMENTS=({shlex.join(['train', *planned])})\n" in capsys.readouterr().out
    assert main(["launch", "slurm", "--ranks-per-node=2", *planned[:-1], "h1000"]) == 2
    assert "--plan is 'h1000'" in capsys.readouterr().err
    assert main(["launch", "slurm", str(config), "--ranks-per-node=3", "resources.update.data=2", "--dry-run"]) == 2
    assert "resources.update.data 2 does not divide the job's 3 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slrm", "run.yaml"], "slurm or msrun, not 'slrm'; did you mean slurm?"),
        (["slurm", "run.yaml"], "launch needs --ranks-per-node N"),
        (["slurm", "--ranks-per-node", "2"], "launch needs a config"),
        (["slurm", "run.yaml", "--ranks-per-node", "two"], "--ranks-per-node is 'two', but must be a whole number"),
        (
            ["msrun", "run.yaml", "--ranks-per-node=2", "--sbatch=--time=1"],
            "--sbatch is '--time=1' for msrun, but must",
        ),
        (["slurm", "run.yaml", "--ranks-per-node=2", "--sbatch=--comment='"], "must be one option of Slurm's sbatch"),
        (["slurm", "run.yaml", "--ranks-per-node=2", "--sbatch", "time=1"], "must be one option of Slurm's sbatch"),
    ],
)
def test_a_launch_that_can_not_be_is_refused_with_the_way_out(arguments, message, capsys):
    assert main(["launch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_job_is_not_started_by_each_rank_of_another(monkeypatch, capsys):
    for name, value in {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "n1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "0")
    assert main(["launch", "slurm", "run.yaml", "--ranks-per-node=2"]) == 2
    assert "it runs on 2 ranks; run it once" in capsys.readouterr().err


def test_without_slurm_the_way_out_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "slurm", str(tiny_config(tmp_path)), "--ranks-per-node=1"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


def test_the_script_that_is_submitted_is_the_one_that_is_printed(tmp_path, monkeypatch, capsys):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\n/bin/cat > {tmp_path}/submitted\nexit 5\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["launch", "slurm", str(tiny_config(tmp_path)), "--ranks-per-node=2"]
    assert main([*arguments, "--dry-run"]) == 0
    assert main(arguments) == 5
    assert (tmp_path / "submitted").read_text() == capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NODES": "2"}, "HEAD is 127.0.0.1, which other nodes can't reach"),
        ({"NODES": "2", "HEAD": "10.0.0.1"}, "NODE_RANK isn't set"),
        ({"MSRUN": "/nowhere/msrun"}, "there is no /nowhere/msrun; install mindspore"),
        ({"MSRUN": "true", "PYTHON": "/nowhere/python"}, "/nowhere/python has no spmdrl"),
    ],
)
def test_what_msrun_could_not_start_is_refused(variables, message):
    done = subprocess.run(
        ["bash", str(SCRIPTS / "msrun.sh"), "train", "run.yaml"],
        env=environment(**variables), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr


def test_a_head_that_is_nowhere_is_refused():
    own = environment(NODES="2", HEAD="no.such.host.invalid", PYTHON=sys.executable)
    done = subprocess.run([*torchrun_script(ROOT), "train", "x"], env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no way to HEAD, which is no.such.host.invalid" in done.stderr
