"""The launch environment: the one place that reads what torchrun left in the environment."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class StartRefused(ValueError):
    """Why this job can't start, found when its ranks met; the same on every rank."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """Who this process is within the job, and where the job's rank 0 listens."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    source: str = "python"

    def __post_init__(self) -> None:
        for name, value, bound in (
            ("RANK", self.rank, self.world_size),
            ("LOCAL_RANK", self.local_rank, self.local_world_size),
            ("GROUP_RANK", self.node_rank, self.num_nodes),
        ):
            if not 0 <= value < bound:
                raise ValueError(
                    f"the launcher set {name}={value}, which is not in 0..{bound - 1}; "
                    "start the job with torchrun, or with plain python for one rank"
                )

    def node_of(self, rank: int) -> int:
        """The node that a rank runs on; nodes hold equally many consecutive ranks, as torchrun numbers them."""
        return rank // self.local_world_size

    def first_rank_of(self, node: int) -> int:
        """The local-rank-0 process of a node."""
        return node * self.local_world_size


TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_launch_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Read torchrun's variables; a process started without any of them is a job of one rank.

    Raises ValueError when only some are set, when one is not a number, or when nodes differ in size.
    """
    present = [name for name in TORCHRUN_VARIABLES if name in environ]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return LaunchEnvironment()
    missing = sorted(set(TORCHRUN_VARIABLES) - set(present))
    if missing:
        raise ValueError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}; "
            "start the job with torchrun, which sets them all, or unset them for one rank"
        )
    world_size = _integer(environ, "WORLD_SIZE")
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE")
    if local_world_size < 1 or world_size % local_world_size:
        raise ValueError(
            f"WORLD_SIZE={world_size} is not a multiple of LOCAL_WORLD_SIZE={local_world_size}; "
            "every node must run the same number of ranks"
        )
    rank = _integer(environ, "RANK")
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        num_nodes=world_size // local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=_integer(environ, "MASTER_PORT"),
        source="torchrun",
    )


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"the launcher set {name}={environ[name]!r}, which is not a whole number") from None


def command_of(*words: str) -> str:
    """A command line that runs this program in the environment that it runs in now, activated or not."""
    own, found = Path(sys.executable), shutil.which("python")
    if found is not None and Path(found).parent == own.parent:
        python = "python"
    else:
        python = str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)
    return " ".join([python, "-m", "spmdrl", *words])
