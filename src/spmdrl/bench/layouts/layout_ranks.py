"""Compares update layouts with one process, each mesh on gloo ranks of its own on this host.

Ranks don't outlive their mesh, because PyTorch remembers meshes, and with them process groups that would be closed.
They are forked from one process that has imported what takes long, so they start at once.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import operator
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import ProcessException, start_processes

from spmdrl.bench.layouts.layout_models import model_for
from spmdrl.bench.layouts.layout_parity import Finding, compare, write_reference
from spmdrl.bench.layouts.traffic import with_own_groups
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import open_world

HOST = "127.0.0.1"
# Not this package: the process that forks could find another copy of it than the one that runs.
_IMPORTED_ONCE = ["torch.distributed.fsdp", "torch.distributed.pipelining", "safetensors.torch", "tensordict"]
_FINDINGS_FILE, _FAILURE_FILE = "findings.jsonl", "failure.txt"
# Ranks that wait longer for each other, even on a busy machine, have lost one.
_LONGEST_WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Case:
    """One model under one layout, which is fitted."""

    model: str
    layout: UpdateLayout

    @property
    def config(self) -> DecoderConfig:
        return model_for(self.model, self.layout)

    def reference_path(self, folder: Path) -> Path:
        """Where what one process makes of the same model is kept."""
        return folder / f"{self.model}-{self.config.num_layers}.safetensors"

    @property
    def degrees(self) -> tuple[int, ...]:
        """What the layout's mesh depends on."""
        layout = self.layout
        return layout.data, layout.shard, layout.pipeline, layout.context, layout.tensor, layout.expert


def run_cases(cases: Sequence[Case], num_ranks: int) -> dict[Case, Finding]:
    """Run all cases on gloo ranks that end with them. Raises RuntimeError with what the first rank to fail raised."""
    multiprocessing.set_forkserver_preload(_IMPORTED_ONCE)
    by_degrees = operator.attrgetter("degrees")
    # Worlds and their groups take longer to make than tiny models: one for all cases that can share it.
    rounds = [list(group) for _, group in itertools.groupby(sorted(cases, key=by_degrees), key=by_degrees)]
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        alone = list({case.reference_path(folder): case for case in cases}.values())
        _run_ranks(_write_reference, len(alone), alone, folder)
        for group in rounds:
            _run_ranks(_compare_all, num_ranks, group, folder)
        lines = (folder / _FINDINGS_FILE).read_text().splitlines() if rounds else []
    findings = (Finding(**json.loads(line)) for line in lines)
    return dict(zip(itertools.chain(*rounds), findings, strict=True))


def _run_ranks(function: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Call `function(rank, port of a store, *arguments)` in so many processes, and wait for their ends."""
    # Bound before the ranks get its port.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    failure = Path(arguments[-1]) / _FAILURE_FILE
    ranks = start_processes(function, (store.port, *arguments), nprocs=num_ranks, join=False, start_method="forkserver")
    try:
        while not ranks.join():
            pass
    except ProcessException as error:
        raise RuntimeError(failure.read_text() if failure.exists() else str(error)) from None
    finally:
        for process in ranks.processes:
            process.kill()


def _write_reference(index: int, port: int, cases: Sequence[Case], folder: Path) -> None:
    """Train the model of one of the cases in this process alone."""
    _be_rank(0, 1, port)
    with open_world("cpu") as world:
        mesh = build_update_mesh(fit_update_layout(UpdateLayout(), 1), world.device, 0)
        write_reference(cases[index].config, mesh, world.device, cases[index].reference_path(folder))


def _compare_all(rank: int, port: int, cases: Sequence[Case], folder: Path) -> None:
    """Run the cases of one mesh; the first rank writes the findings. Collective over all ranks."""
    _be_rank(rank, cases[0].layout.num_ranks, port)
    with open_world("cpu", _LONGEST_WAIT_SECONDS) as world, open(folder / _FINDINGS_FILE, "a") as file:
        mesh = with_own_groups(build_update_mesh(cases[0].layout, world.device, rank))
        for case in cases:
            try:
                own_mesh = replace(mesh, layout=case.layout)
                found = compare(case.config, own_mesh, world.device, case.reference_path(folder))
            except Exception:
                _note_failure(case, rank, folder)
                raise
            every = [Finding(**json.loads(answer)) for answer in gather_bytes(found.to_json().encode())]
            if world.is_main:
                file.write(functools.reduce(operator.or_, every).to_json() + "\n")


def _note_failure(case: Case, rank: int, folder: Path) -> None:
    """Keep the exception at hand, unless another rank was first: then it only reports a peer that is gone."""
    with suppress(FileExistsError), open(folder / _FAILURE_FILE, "x") as file:
        file.write(f"{case.model} failed under {case.layout} on rank {rank}\n{traceback.format_exc()}")


def _be_rank(rank: int, num_ranks: int, port: int) -> None:
    """Set what a launcher sets in its ranks' environment."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
