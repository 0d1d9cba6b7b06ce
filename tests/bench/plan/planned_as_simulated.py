"""`spmdrl plan` for the simulated accelerator: `python -m tests.bench.plan.planned_as_simulated FILE ...`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.cli.command_line import main
from spmdrl.engines.generation.native import cached_attention
from tests.support.simulated_accelerator.table_rows import fill_tables

PROFILE = "{memory_gib: 1.0, kernels: sim}\n"


@torch.library.register_fake("simulated::paged_attention")
def _attended(q_BHK: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Tensor:
    return q_BHK.new_empty(*q_BHK.shape[:2], values.shape[-1])


def plan() -> int:
    fill_tables("sim", "simccl")
    for table in (cached_attention.WHOLE_ROW_TILES, cached_attention.ONE_BY_ONE):
        table["planned"] = table["sim"]
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "sim.yaml"
        profile.write_text(PROFILE)
        return main(["plan", *sys.argv[1:], "--device", str(profile)])


if __name__ == "__main__":
    sys.exit(plan())
