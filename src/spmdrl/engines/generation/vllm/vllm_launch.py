"""The launcher's environment variables while a vLLM engine is built."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from spmdrl.resources.startup.launch import TORCHRUN_VARIABLES, read_launch_environment


@contextlib.contextmanager
def launch_variables() -> Iterator[None]:
    """The launcher's variables for vLLM, which needs two also in a job without a launcher, and rewrites others."""
    launch = read_launch_environment(os.environ)
    kept = {name: os.environ.get(name) for name in TORCHRUN_VARIABLES}
    os.environ.update({"RANK": str(launch.rank), "LOCAL_RANK": str(launch.local_rank)})
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
