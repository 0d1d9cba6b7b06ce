"""The launch environment: the one place that reads what a launcher left in the environment."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

Launcher = Literal["python", "torchrun", "srun", "msrun"]


class StartRefused(ValueError):
    """Reason why this job can't start, found when its ranks met."""

    def __init__(self, text: str, *, is_shown: bool = False):
        super().__init__(text)
        self.is_shown = is_shown
        """true if this rank's screen shows the text already, or another rank shows it there"""


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place in the job, and the address of the job's rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    source: Launcher = "python"
    sees_one_device: bool = False
    """true if the launcher gives each process of a node one visible device instead of all"""

    @property
    def device_index(self) -> int:
        """The number of this process's device among those that it sees."""
        return 0 if self.sees_one_device else self.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this process's node."""
        return self.node_of(self.rank)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job."""
        return self.world_size // self.local_world_size

    def node_of(self, rank: int) -> int:
        """Return the node that a rank runs on; nodes hold equally many consecutive ranks."""
        return rank // self.local_world_size

    def first_rank_of(self, node: int) -> int:
        """Return the rank of a node's local-rank-0 process."""
        return node * self.local_world_size


TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SRUN_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
)  # fmt: skip
_MSRUN_VARIABLES = ("MS_NODE_ID", "RANK_ID", "RANK_SIZE", "DEVICE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT")
# Beginnings of the names of all variables by which launchers place a process in a job.
_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_", "MS_", "DEVICE_ID")
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


def read_launch_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Read the launcher's variables; a process started without a launcher is a job of one rank.

    torchrun's come first, since torchrun may itself run under srun or msrun, and srun's last. Raises ValueError if only
    some are set, if one is not a number, or if nodes differ in size.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _started_by_torchrun(environ)
    if "MS_ROLE" in environ:
        return _started_by_msrun(environ)
    # SLURM_PROCID is also in a batch script, which is no task of a step.
    if "SLURM_STEP_ID" in environ:
        return _started_by_srun(environ)
    return LaunchEnvironment()


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program that a rank starts and that is no rank itself."""
    return {name: value for name, value in environ.items() if not name.startswith(_PLACES)}


def is_msruns_scheduler(environ: Mapping[str, str]) -> bool:
    """Return True if this is the program that msrun starts beside its workers, as MindSpore's scheduler."""
    return environ.get("MS_ROLE") == "MS_SCHED" and "RANK" not in environ


def _started_by_torchrun(environ: Mapping[str, str]) -> LaunchEnvironment:
    _require(environ, TORCHRUN_VARIABLES, "start the job with torchrun, which sets them all, or unset them")
    world_size, local_world_size = _integer(environ, "WORLD_SIZE"), _integer(environ, "LOCAL_WORLD_SIZE")
    if local_world_size < 1 or world_size % local_world_size:
        raise ValueError(
            f"WORLD_SIZE={world_size} is not a multiple of LOCAL_WORLD_SIZE={local_world_size}; "
            "every node must run the same number of ranks"
        )
    rank = _index(environ, "RANK", world_size)
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_index(environ, "LOCAL_RANK", local_world_size),
        local_world_size=local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=_port(environ, "MASTER_PORT"),
        source="torchrun",
    )


def _started_by_srun(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Return the environment of a task of srun's step; MASTER_ADDR and MASTER_PORT win over what the step gives."""
    _require(environ, _SRUN_VARIABLES, "start the ranks with srun, or unset SLURM_STEP_ID for one rank")
    world_size = _integer(environ, "SLURM_STEP_NUM_TASKS")
    per_node = environ["SLURM_STEP_TASKS_PER_NODE"]
    if (alike := re.fullmatch(r"([1-9]\d*)(\(x\d+\))?", per_node)) is None or world_size % int(alike[1]):
        raise ValueError(
            f"srun set SLURM_STEP_TASKS_PER_NODE={per_node}, but every node must run the same number of ranks; "
            "use --ntasks-per-node=N without --ntasks"
        )
    local_world_size = int(alike[1])
    rank = _index(environ, "SLURM_PROCID", world_size)
    local_rank = _index(environ, "SLURM_LOCALID", local_world_size)
    if rank % local_world_size != local_rank:
        raise ValueError(
            f"srun set SLURM_PROCID={rank} and SLURM_LOCALID={local_rank} with {local_world_size} tasks on each node, "
            "but the ranks of a node must be consecutive; use --distribution=block"
        )
    derived = _FIRST_PORT + _integer(environ, "SLURM_JOB_ID") % _NUM_PORTS
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=environ.get("MASTER_ADDR") or _first_host(environ["SLURM_STEP_NODELIST"]),
        master_port=_port(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else derived,
        source="srun",
        # Unless --gpu-bind=none has tasks see all of them, as the list of devices then shows.
        sees_one_device=environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"
        and "," not in environ.get("CUDA_VISIBLE_DEVICES", ""),
    )


def _first_host(node_list: str) -> str:
    """Return the first name of Slurm's list of hosts, such as `gpu007` of `gpu[007-009,012],login1`."""
    first = re.match(r"(?:\[[^]]*]|[^,[])*", node_list)
    return re.sub(r"\[(\w+)[^]]*]", r"\1", first[0] if first else "")


def _started_by_msrun(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Return the environment of msrun's worker; ranks meet one port above MindSpore's scheduler, which isn't used."""
    _require(
        environ, _MSRUN_VARIABLES, "start the ranks with msrun, on several nodes with --node_rank, or unset MS_ROLE"
    )
    world_size = _integer(environ, "RANK_SIZE")
    local_world_size = _msruns_local_workers(environ, world_size)
    rank = _index(environ, "RANK_ID", world_size)
    local_rank = _index(environ, "DEVICE_ID", local_world_size)
    if rank % local_world_size != local_rank:
        raise ValueError(
            f"msrun set RANK_ID={rank} and DEVICE_ID={local_rank} with LOCAL_WORLD_SIZE={local_world_size}, but the "
            "ranks of a node must be consecutive; give msrun --local_worker_num=LOCAL_WORLD_SIZE and --node_rank"
        )
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=environ["MS_SCHED_HOST"],
        master_port=_port(environ, "MS_SCHED_PORT", most=65_534) + 1,
        source="msrun",
    )


def _msruns_local_workers(environ: Mapping[str, str], world_size: int) -> int:
    """Return the workers per node, which msrun doesn't export; a single node has a loopback address."""
    if "LOCAL_WORLD_SIZE" in environ:
        local_world_size = _integer(environ, "LOCAL_WORLD_SIZE")
        if local_world_size < 1 or world_size % local_world_size:
            raise ValueError(
                f"LOCAL_WORLD_SIZE={local_world_size} doesn't divide msrun's RANK_SIZE={world_size}; "
                "set it to msrun's --local_worker_num, the same on every node"
            )
        return local_world_size
    host = environ["MS_SCHED_HOST"]
    # msrun resolves names before it exports the address.
    if world_size > 1 and not ip_address(host).is_loopback:
        raise ValueError(
            f"msrun set MS_SCHED_HOST={host}, an address for several nodes, but doesn't export how many workers each "
            "of them runs; export LOCAL_WORLD_SIZE=N before msrun --local_worker_num=N, as spmdrl launch msrun does"
        )
    return world_size


def _require(environ: Mapping[str, str], names: Sequence[str], advice: str) -> None:
    present = [name for name in names if name in environ]
    if missing := sorted(set(names) - set(present)):
        raise ValueError(f"the environment sets {', '.join(present)} but not {', '.join(missing)}; {advice}")


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"the launcher set {name}={environ[name]!r}, which is not a whole number") from None


def _index(environ: Mapping[str, str], name: str, bound: int) -> int:
    value = _integer(environ, name)
    if not 0 <= value < bound:
        raise ValueError(
            f"the launcher set {name}={value}, which is not in 0..{bound - 1}; "
            "start the job with torchrun, srun or msrun, or with plain python for one rank"
        )
    return value


def _port(environ: Mapping[str, str], name: str, most: int = 65_535) -> int:
    value = _integer(environ, name)
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value}, but a port is at most {most} here; choose another one")
    return value


def command_of(*words: str) -> str:
    """Return a command line that runs this program in the environment that it runs in now, activated or not."""
    own, found = Path(sys.executable), shutil.which("python")
    if found is not None and Path(found).parent == own.parent:
        python = "python"
    else:
        python = str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)
    return " ".join([python, "-m", "spmdrl", *words])
