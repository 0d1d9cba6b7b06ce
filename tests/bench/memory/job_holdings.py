"""What a running job holds, read from outside: its ranks' memory, descriptors, threads and children, and its files."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.faults.fault_jobs import processes_below

_SECONDS = 0.1
_MIB = 1 << 20
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
# By the first part of a path in the run's folder; a kind that isn't named here is `other files`.
FILES_OF = {
    "metrics.jsonl": "metrics", "timeline": "timeline", "rows": "rows", "samples.jsonl": "samples",
    "eval": "evaluations", "report.html": "report", "checkpoints": "checkpoints",
}  # fmt: skip
# They have a file per evaluation, and one per MiB.
_PARTED = ("evaluations", "timeline")


@dataclass(frozen=True)
class Holding:
    """What a job held after a step."""

    step: int
    amounts: Mapping[str, float]
    """by what it is, in the unit that its name has"""


@dataclass
class HoldingSampler:
    """Looks at the job that this process runs each `interval` steps, as its metrics count them."""

    run: Path
    interval: int
    holdings: list[Holding] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look within the block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._look_until, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _look_until(self, ended: threading.Event) -> None:
        due = self.interval
        while not ended.wait(_SECONDS):
            if (step := self._newest_step()) >= due and (ranks := _ranks_below(os.getpid())):
                # A rank that ends meanwhile leaves nothing to read.
                with suppress(OSError):
                    self.holdings.append(Holding(step, amounts_of(ranks) | amounts_in(self.run)))
                due = step - step % self.interval + self.interval

    def _newest_step(self) -> int:
        path = self.run / "metrics.jsonl"
        if not path.is_file():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0


def _ranks_below(pid: int) -> dict[int, int]:
    """The process of each rank, started by a launcher that this one has started."""
    found = {}
    for launcher in processes_below(pid):
        for process in processes_below(launcher):
            with suppress(OSError):
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                found |= {int(line[5:]): process for line in variables if line.startswith(b"RANK=")}
    return dict(sorted(found.items()))


def amounts_of(ranks: Mapping[int, int]) -> dict[str, float]:
    """What the processes of ranks hold."""
    amounts: dict[str, float] = {}
    for rank, process in ranks.items():
        children = processes_below(process)
        amounts |= {
            f"resident memory of rank {rank}, MiB": _resident_bytes(process) / _MIB,
            f"resident memory of rank {rank}'s children, MiB": sum(map(_resident_bytes, children)) / _MIB,
            f"descriptors of rank {rank}": len(os.listdir(f"/proc/{process}/fd")),
            f"threads of rank {rank}": len(os.listdir(f"/proc/{process}/task")),
            f"child processes of rank {rank}": len(children),
        }
    return amounts | {"named files in /dev/shm": len(os.listdir(_SHARED_MEMORY))}


def _resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def amounts_in(run: Path) -> dict[str, float]:
    """The bytes of each kind of file in a run's folder, and the number of files that aren't parts or evaluations."""
    num_bytes, num_files = Counter(dict.fromkeys([*FILES_OF.values(), "other files"], 0)), 0
    for path in run.rglob("*"):
        kind = FILES_OF.get(path.relative_to(run).parts[0], "other files")
        # A file may be replaced meanwhile.
        with suppress(FileNotFoundError):
            if path.is_file():
                num_bytes[kind] += path.stat().st_size
                num_files += kind not in _PARTED
    return {f"files but for {' and '.join(_PARTED)}": num_files} | {
        f"{kind}, bytes": size for kind, size in num_bytes.items()
    }
