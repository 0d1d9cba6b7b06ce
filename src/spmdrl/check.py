"""The `check` verb: says what a config means, and whether anything speaks against it."""

from __future__ import annotations

import os

from spmdrl.config import Config
from spmdrl.configfile import LoadedConfig
from spmdrl.job.checked import check_run
from spmdrl.observability.screen import show
from spmdrl.resources.launch import read_launch_environment


def main(loaded: LoadedConfig[Config]) -> int:
    """Print the resolved config, the layout and the stages; train nothing."""
    checked = check_run(loaded, "check")
    launch, generation = read_launch_environment(os.environ), checked.config.resources.generation
    if launch.rank != 0:
        return 0
    show(checked.resolved_config, end="")
    show(f"# update layout: {checked.layout}")
    show(f"# generation layout: {generation}, replicas: {launch.world_size // generation.tensor}")
    show(f"# worker states: {' -> '.join(state.value for state in checked.needs)}")
    for source in (*checked.train_rows, *checked.eval_rows):
        show(f"# {source.summary}")
    return 0
