"""The script that starts a run under Slurm or msrun, filled in for one job.

The scripts beside this file also run unchanged, with their settings in the environment. Filled in, they don't depend on
the environment any more.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unicodedata import category

from spmdrl.config.reader import ConfigError

SYSTEMS = {"slurm": "slurm.sbatch", "msrun": "msrun.sh"}
# In the scripts' form: NAME=${NAME:-DEFAULT}, and after two spaces a description.
_SETTING = re.compile(r"^(?P<name>[A-Z_]+)=(?:\$\{(?P=name):-(?P<default>[^}]*)\}|\(\"\$@\"\))(?=  #|$)", re.MULTILINE)
# Controls, lone surrogates, and line separators: quotes don't hold in a comment, which would end there.
_BREAKING = frozenset({"Cc", "Cs", "Zl", "Zp"})
_FIRST_LINE = "#!/usr/bin/env bash\n"


@dataclass(frozen=True)
class Job:
    """A job to start."""

    system: str
    """one of SYSTEMS"""
    verb: str
    words: tuple[str, ...]
    """the verb's files and overrides, as they were written"""
    num_nodes: int
    ranks_per_node: int
    name: str
    options: tuple[str, ...] = ()
    """options of sbatch, each with its two dashes"""


def job_script(job: Job, environ: Mapping[str, str]) -> str:
    """Return the script with all settings filled in: the job's, the environment's, and defaults."""
    for word in (*job.words, job.name, *job.options):
        if not _BREAKING.isdisjoint(map(category, word)):
            raise ConfigError(f"{word!r} has a control character, which a script can't hold; remove it")
    given = {
        "NODES": str(job.num_nodes),
        "RANKS_PER_NODE": str(job.ranks_per_node),
        "PYTHON": sys.executable,
    }
    words = " ".join(map(shlex.quote, (job.verb, *job.words)))

    def filled(setting: re.Match[str]) -> str:
        name = setting["name"]
        if setting["default"] is None:
            return f"{name}=({words})"
        return f"{name}={shlex.quote(given.get(name, environ.get(name) or setting['default']))}"

    script = Path(__file__).with_name(SYSTEMS[job.system]).read_text()
    script = _SETTING.sub(filled, script)
    if job.system == "slurm":
        script = _with_options(
            script, (f"--job-name={shlex.quote(job.name)}", f"--nodes={job.num_nodes}", *job.options)
        )
    options = [shlex.quote(f"--sbatch={option}") for option in job.options]
    flags = " ".join([f"--nodes {job.num_nodes} --ranks-per-node {job.ranks_per_node}", *options])
    head = f"{_FIRST_LINE}# Filled in by: spmdrl launch {job.system} {words} {flags}\n"
    return head + script.removeprefix(_FIRST_LINE)


def _with_options(script: str, options: tuple[str, ...]) -> str:
    """Return the script with options of sbatch, each in place of the script's own one of that name."""
    for option in options:
        name, line = option.partition("=")[0], f"#SBATCH {option}"
        own = re.compile(rf"^#SBATCH {re.escape(name)}(=.*)?$", re.MULTILINE)
        if own.search(script):
            script = own.sub(line.replace("\\", r"\\"), script)
        else:
            script = script.replace("\nset -uo", f"\n{line}\nset -uo", 1)
    return script


def start(system: str, script: str) -> int:
    """Submit the script to Slurm and return sbatch's code, or run it in this process's place."""
    if system == "slurm":
        if (sbatch := shutil.which("sbatch")) is None:
            raise ConfigError(
                "there is no sbatch here; run this where jobs are submitted, or print the script with --dry-run"
            )
        return subprocess.run([sbatch], input=script, text=True, check=False).returncode
    sys.stdout.flush()
    os.execvp("bash", ["bash", "-c", script, SYSTEMS[system]])  # noqa: S606, S607 the shell that runs the plain one too
