"""Command line of the verb `launch`, which fills in a launch script and prints or starts it."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from spmdrl.cli.flags import take_numbers, take_planned_device, take_verb
from spmdrl.config.reader import ConfigError, start_up
from spmdrl.config.sources import split_arguments
from spmdrl.observability.terminal.spelling import nearest
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.screen import show
from spmdrl.verbs.launching.job_script import SYSTEMS, Job, job_script, start


def main(arguments: Sequence[str], launch: LaunchEnvironment, verbs: Sequence[str]) -> int:
    """Check the config of a job of one of `verbs`, then print its script or start it. Returns the starter's code."""
    if launch.world_size > 1:
        raise ConfigError(
            f"launch starts a job, but it runs on {launch.world_size} ranks; run it once, without a launcher"
        )
    system, *rest = arguments or [""]
    if system not in SYSTEMS:
        near = nearest(system, SYSTEMS)
        raise ConfigError(
            f"launch starts a run under {' or '.join(SYSTEMS)}, not {system!r}"
            + (f"; did you mean {near}?" if near else ", as in spmdrl launch slurm run.yaml --ranks-per-node 8")
        )
    numbers, rest = take_numbers(rest, ("--nodes", "--ranks-per-node"))
    if "--ranks-per-node" not in numbers:
        raise ConfigError("launch needs --ranks-per-node N: the number of ranks per node, one per device")
    options, rest = _take_options(rest, system)
    named = {"--gpus-per-node": ("--gpus", "--gres"), "--time": ("--time",)}
    lacking = [name for name, ways in named.items() if not any(option.startswith(ways) for option in options)]
    if system == "slurm" and lacking:
        advice = " ".join(f"--sbatch={name}=..." for name in lacking)
        show(f"launch: no {' and no '.join(lacking)}, so the partition's defaults hold; {advice}", stream=sys.stderr)
    is_dry = "--dry-run" in rest
    rest = [word for word in rest if word != "--dry-run"]
    verb, words = take_verb(rest, verbs)
    nodes, ranks_per_node = numbers.get("--nodes", 1), numbers["--ranks-per-node"]
    planned = LaunchEnvironment(world_size=nodes * ranks_per_node, local_world_size=ranks_per_node)
    name = _checked_name(*(take_verb(words, verbs) if verb == "check" else (verb, words)), planned)
    job = Job(system, verb, tuple(words), nodes, ranks_per_node, name=name, options=options)
    script = job_script(job, os.environ)
    if is_dry:
        show(script, end="")
        return 0
    return start(system, script)


def _take_options(arguments: Sequence[str], system: str) -> tuple[tuple[str, ...], list[str]]:
    """Split all `--sbatch=OPTION` from the other arguments."""
    options, others, rest = [], [], deque(arguments)
    while rest:
        flag, equals, option = rest.popleft().partition("=")
        if flag != "--sbatch":
            others.append(flag + equals + option)
            continue
        option = option if equals else (rest.popleft() if rest else "")
        if system != "slurm" or not option.startswith("--") or re.search(r"[\s\"']", option):
            raise ConfigError(
                f"--sbatch is {option!r} for {system}, but must be one option of Slurm's sbatch, "
                "as in launch slurm --sbatch=--partition=gpu"
            )
        options.append(option)
    return tuple(options), others


def _checked_name(verb: Any, words: Sequence[str], planned: LaunchEnvironment) -> str:
    """Check the config as the ranks will, and return the run's name."""
    files, overrides = split_arguments(take_planned_device(words)[1] if verb == "train" else words)
    if not files and not overrides:
        raise ConfigError("launch needs a config; write spmdrl launch slurm FILE.yaml --ranks-per-node 8")
    from spmdrl.config.config import load_config

    with start_up():
        loaded = load_config(files, overrides, verb)
    # Imports torch.
    from spmdrl.verbs.check import refuse_what_ranks_would

    refuse_what_ranks_would(loaded, verb, planned)
    return loaded.value.run.folder.name
