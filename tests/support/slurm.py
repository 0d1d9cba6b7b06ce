"""A real Slurm on this machine: munged, slurmctld and a slurmd per "node", all from a folder, and gone afterwards.

`python -m tests.support.slurm` starts one, prints the variable that leads to it, and waits for Ctrl-C.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.jobs import environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "unshare")
CORES_PER_NODE = 4
_CONF = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmctldPort={port}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=20
Waittime=0
JobRequeue=1
RequeueExit=75
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{extra}
PartitionName=low Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cores} Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN\n"
)
_NODES = ("n1", "n2")
_SECONDS = 60.0


def why_not() -> str | None:
    """Why there can't be a Slurm here, if so."""
    if os.geteuid() != 0:
        return "starting Slurm's daemons needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"there is no {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else None


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """For its commands and jobs. Its nodes share this host's loopback interface."""
        return environment(SLURM_CONF=str(self.folder / "slurm.conf"), GLOO_SOCKET_IFNAME="lo")

    def command(self, *words: str | Path, timeout: float = _SECONDS, **extra: str) -> str:
        """What one of Slurm's commands prints; raises if it fails."""
        done = subprocess.run(
            [*map(str, words)], env=self.environ | extra, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def submit(self, *words: str | Path, cwd: Path, **extra: str) -> int:
        """The id of a new job, submitted from a folder."""
        printed = self.command("sbatch", f"--chdir={cwd}", *words, **extra)
        return int(re.search(r"job (\d+)", printed)[1])

    def job(self, number: int) -> Mapping[str, str]:
        """Slurm's record of a job, such as JobState and Restarts."""
        printed = self.command("scontrol", "show", "job", "--oneliner", str(number))
        return dict(word.partition("=")[::2] for word in printed.split())

    def wait_for(self, number: int, *states: str, timeout: float = 120.0) -> Mapping[str, str]:
        """The job's record once it is in one of the states."""
        deadline = time.monotonic() + timeout
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {number} is {job['JobState']}, not {states}"
            time.sleep(0.3)
        return job

    def processes(self) -> dict[int, str]:
        """Process ids and commands of jobs and of what looks after them, whoever their parents are."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if f"SLURM_CONF={self.folder / 'slurm.conf'}".encode() not in variables:
                    continue
                if command.startswith("slurmstepd") or any(name.startswith(b"SLURM_JOB_ID=") for name in variables):
                    found[int(folder.name)] = command
        return found

    @contextmanager
    def without(self, node: str) -> Iterator[None]:
        """Within the block a node doesn't answer, as where its link is down: all that runs on it stands still."""
        stopped = self._processes_of(node)
        assert len(stopped) > 1, f"nothing runs on {node}"
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _processes_of(self, node: str) -> list[int]:
        """A node's daemon, the tasks that run there, and what looks after these."""
        named = f"SLURMD_NODENAME={node}".encode()
        jobs = self.processes()
        tasks = [pid for pid in jobs if named in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
        parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in tasks}
        daemon = (self.folder / f"slurmd.{node}.pid").read_text()
        return [int(daemon), *(parents & jobs.keys()), *tasks]


@contextmanager
def slurm(extra: str = "") -> Iterator[Slurm]:
    """Run a cluster of two nodes for as long as the block lasts; `extra` goes into its slurm.conf."""
    # munged wants every folder on the way to its socket closed to other writers, and tests' own aren't.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/run") as name:
        cluster = Slurm(Path(name))
        _configure(cluster.folder, extra)
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            _start(cluster, daemons)
            yield cluster
        finally:
            _end(cluster, daemons)


def _configure(folder: Path, extra: str) -> None:
    folder.chmod(0o755)
    for name in ("ctld", "munge", *(f"spool.{node}" for node in _NODES)):
        (folder / name).mkdir(mode=0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o400)
    (folder / "hosts").write_text(f"127.0.0.1 {' '.join(_NODES)}\n{Path('/etc/hosts').read_text()}")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    ports = _free_ports(1 + len(_NODES))
    conf = _CONF.format(folder=folder, port=ports[0], extra=extra)
    nodes = "".join(
        _NODE.format(name=name, port=port, cores=CORES_PER_NODE) for name, port in zip(_NODES, ports[1:], strict=True)
    )
    head, partitions = conf.split("PartitionName", 1)
    (folder / "slurm.conf").write_text(f"{head}{nodes}PartitionName{partitions}")


def _free_ports(count: int) -> list[int]:
    bound = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in bound]
    for one in bound:
        one.close()
    return ports


def _start(cluster: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    folder = cluster.folder
    munge = folder / "munge"
    options = [f"--{name}={munge / file}" for name, file in (("socket", "socket"), ("key-file", "key"))]
    options += [f"--{name}-file={munge / name}" for name in ("pid", "log", "seed")]
    commands = [["munged", "--foreground", *options], ["slurmctld", "-D", "-i"]]
    commands += [["slurmd", "-D", "-N", node] for node in _NODES]
    # The nodes' names have addresses for these processes and their children alone.
    named = ["unshare", "-m", "--propagation", "slave", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']
    with open(folder / "daemons.log", "wb") as log:
        for command in commands:
            daemons.append(
                subprocess.Popen(
                    [*named, str(folder / "hosts"), *command],
                    env=cluster.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip
    deadline = time.monotonic() + _SECONDS
    while _states(cluster).count("idle") < len(_NODES):
        ended = [command[0] for command, daemon in zip(commands, daemons, strict=True) if daemon.poll() is not None]
        assert not ended and time.monotonic() < deadline, f"{ended or 'nodes'}: {_logs(folder)}"
        time.sleep(0.2)


def _states(cluster: Slurm) -> list[str]:
    command = ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%t"]
    done = subprocess.run(command, env=cluster.environ, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split()


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in [*folder.glob("*.log"), folder / "munge" / "log"])


def _end(cluster: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    cancel = ["scancel", "--user=root", "--signal=KILL", "--full"]
    subprocess.run(cancel, env=cluster.environ, timeout=30, check=False, capture_output=True)
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
    for daemon in daemons:
        try:
            daemon.wait(timeout=10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    # slurmd leaves the processes that look after its jobs, and these their jobs.
    for pid in cluster.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run a cluster until Ctrl-C or SIGTERM."""
    awaited = {signal.SIGINT, signal.SIGTERM}
    with slurm() as cluster:
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        print(f"export SLURM_CONF={cluster.folder / 'slurm.conf'} GLOO_SOCKET_IFNAME=lo", flush=True)
        signal.sigwait(awaited)


if __name__ == "__main__":
    main()
