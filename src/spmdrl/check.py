"""The `check` verb: says what a config means, and whether anything speaks against it."""

from __future__ import annotations

import os

from spmdrl.config import Config
from spmdrl.configfile import LoadedConfig
from spmdrl.job.checked import check_run
from spmdrl.resources.launch import read_launch_environment


def main(loaded: LoadedConfig[Config]) -> int:
    """Print the resolved config, the layout and the stages; train nothing."""
    checked = check_run(loaded, "check")
    if read_launch_environment(os.environ).rank != 0:
        return 0
    print(checked.resolved_config, end="")
    print(f"# update layout: data {checked.layout.data} x shard {checked.layout.shard}")
    print(f"# worker states: {' -> '.join(state.value for state in checked.needs)}")
    for source in (*checked.train_rows, *checked.eval_rows):
        print(f"# {source.summary}")
    return 0
