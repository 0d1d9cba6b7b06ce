"""Facts that must be equal on all ranks of a job, as text to compare before they work together."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import spmdrl
from spmdrl.config.config import Config
from spmdrl.config.given import value_leaves
from spmdrl.config.reader import start_up
from spmdrl.dataflow.data.data_rows import SourceRows
from spmdrl.engines.reward.answers import RULES
from spmdrl.job.run.run_folder import hold_folder_of_training
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.watching import watching
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.summary import software_versions
from spmdrl.resources.startup.rendezvous import Network
from spmdrl.resources.world import World, open_world
from spmdrl.runtime.launch import read_launch_environment

# Variables that change which operations ranks run, beside the launcher's own.
_VARIABLES = (
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_DISTRIBUTED_DEBUG", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip


@contextlib.contextmanager
def open_job(checked: CheckedRun, *, trains: bool = False) -> Iterator[World]:
    """Open the world of a run whose ranks have all been checked and agree. Collective.

    With `trains` the job has the run's folder for itself.
    """
    resources = checked.config.resources
    facts = {}
    with start_up():
        launch = read_launch_environment(os.environ)
        if launch.world_size > 1:
            facts = start_facts(checked.config, checked.verb, [*checked.train_rows, *checked.eval_rows])
    network = Network(checked.config.run.folder, trusted=resources.trusted_network)
    world = open_world(
        resources.device, resources.timeout_seconds, facts=facts, network=network,
        start_timeout_seconds=resources.start_timeout_seconds,
    )  # fmt: skip
    with world as opened, watching(checked, opened):
        faultpoint("init")
        with hold_folder_of_training(checked.config, opened) if trains else contextlib.nullcontext():
            yield opened


def start_facts(
    config: Config, verb: str, rows: Sequence[SourceRows], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return all facts but the model's, which is resolved later: code, config, data, reward functions, environment."""
    facts = {"the verb": verb}
    facts |= {f"the version of {package}": version for package, version in software_versions().items()}
    facts["the source of spmdrl"] = _package_digest()
    facts |= {key: repr(value) for key, value in value_leaves(config)}
    for number, source in enumerate(rows):
        facts[f"the rows of {source.source.path} ({number})"] = _rows_digest(source)
    facts |= {f"the file of {spec}": _digest(path) for spec, path in _reward_files(config.reward.functions)}
    facts["the chat template's options"] = config.data.template.described
    facts |= {f"the variable {name}": environ[name] for name in _VARIABLES if name in environ}
    return facts


@cache
def _package_digest() -> str:
    assert spmdrl.__file__ is not None
    return _digest(*sorted(Path(spmdrl.__file__).parent.rglob("*.py")))


def _digest(*paths: Path) -> str:
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path.name} ".encode())
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]


def _rows_digest(source: SourceRows) -> str:
    """Return a digest of the rows as read, so that it covers every format."""
    whole = hashlib.sha256()
    for row in source.rows:
        parts = (row.id, row.prompt, row.answer, row.columns, row.completion, row.rejected)
        whole.update(repr(parts).encode(errors="surrogatepass"))
    return f"{len(source.rows)} rows, {whole.hexdigest()[:16]}"


def _reward_files(specs: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for spec in specs:
        where = spec.rpartition(":")[0]
        if spec in RULES or not where:
            continue
        path = Path(where).expanduser() if where.endswith(".py") else _module_file(where)
        if path is not None and path.is_file():
            yield spec, path


def _module_file(name: str) -> Path | None:
    """Return the file of a module, found without running it or its packages."""
    paths: Sequence[str] | None = sys.path
    names = name.split(".")
    for length in range(1, len(names) + 1):
        spec = PathFinder.find_spec(".".join(names[:length]), paths)
        if spec is None:
            return None
        paths = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
