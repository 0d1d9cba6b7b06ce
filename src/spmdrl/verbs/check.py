"""The `check` verb: prints what a config means, and why it can't run if it can't."""

from __future__ import annotations

import os

from spmdrl.config.config import Config
from spmdrl.config.reader import LoadedConfig, start_up
from spmdrl.job.start.estimates import estimate_lines
from spmdrl.job.start.machine_check import machine_lines
from spmdrl.job.start.prepared import Prepared, prepare, source_without_making
from spmdrl.job.start.reward_lint import lint_rewards
from spmdrl.job.start.start_checks import CheckedRun, Verb, check_run
from spmdrl.observability.terminal.screen import show, waiting
from spmdrl.resources.device import find_device
from spmdrl.resources.startup.launch import LaunchEnvironment, read_launch_environment


def main(loaded: LoadedConfig[Config], planned: LaunchEnvironment | None = None, *, is_linted: bool = False) -> int:
    """Print the resolved config, the layout, sizes and stages; train nothing.

    Refuses what `train` would refuse before its first step. `planned` is another job to check for, whose devices
    needn't be here. `is_linted` is whether rewards are scored on responses of known worth. Returns 1 where a line
    failed. Collective under a launcher, unless another job is planned.
    """
    own = read_launch_environment(os.environ)
    launch = planned or own
    checked, prepared = refuse_what_ranks_would(loaded, "check", planned)
    if own.rank == 0:
        _show(checked, prepared, launch)
    lines = [] if planned is not None else machine_lines(checked, prepared, own)
    if is_linted and own.rank == 0:
        rows, turns = [*checked.train_rows, *checked.eval_rows], checked.config.environment.function is not None
        with start_up(), waiting("scoring responses of known worth"):
            lines += lint_rewards(checked.config.reward, rows, has_turns=turns)
    if own.rank == 0:
        for line in lines:
            show(f"# {'ok    ' if line.passed else 'FAILED'} {line.text}")
    return int(not all(line.passed for line in lines))


def refuse_what_ranks_would(
    loaded: LoadedConfig[Config], verb: Verb, planned: LaunchEnvironment | None
) -> tuple[CheckedRun, Prepared]:
    """What a verb's ranks would begin with; raises what they would refuse to start with."""
    checked = check_run(loaded, verb, launch=planned)
    with start_up(), source_without_making(checked.config) as source:
        return checked, prepare(checked, source)


def _show(checked: CheckedRun, prepared: Prepared, launch: LaunchEnvironment) -> None:
    config = checked.config
    wanted, generation = config.resources.device, config.resources.generation
    device_kind = find_device("auto", 0).kind if wanted == "auto" else wanted
    lines = [
        f"update layout: {checked.layout}",
        *(f"{role.name} layout: {layout}" for role, layout in checked.own_layouts.items()),
        f"generation layout: {generation}, replicas: {launch.world_size // generation.tensor}",
        f"worker states: {' -> '.join(state.value for state in checked.needs)}",
        *(source.summary for source in (*checked.train_rows, *checked.eval_rows)),
        *estimate_lines(checked, prepared, launch, device_kind),
        *prepared.warnings,
    ]
    if launch.world_size > 1:
        lines.append(f"ranks: {launch.world_size} on {launch.num_nodes} nodes; their devices weren't looked at")
    show(checked.resolved_config, end="")
    for line in lines:
        show(f"# {line}")
