"""CUDA paths run on fake tensors: kernels, every family, both engines, FSDP2; the page on accelerators lists them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from spmdrl.engines.models.hf.families import FAMILIES
from tests.accelerators.cuda_traces import as_markdown
from tests.accelerators.fake_cuda import guarded_environment, why_not
from tests.accelerators.published_models import PUBLISHED
from tests.support.jobs import ROOT

# Triton launches nothing on fake tensors.
TRACE = """
import runpy, sys
sys.modules["triton"] = None
runpy.run_module("tests.accelerators.cuda_traces", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "group",
    [
        "sharding",
        *(pytest.param(group, marks=pytest.mark.slow) for group in ("kernels", "models", "engines", "layouts")),
    ],
)
def test_what_a_gpu_would_run_has_its_shapes_dtypes_and_device(group: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, "-c", TRACE, group]
    # First on its path: the copy that is tested, not an installed one.
    environment = guarded_environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    failures = json.loads(done.stdout.splitlines()[-1])
    assert failures and not any(failures.values()), "\n".join(
        f"{name}\n{text}" for name, text in failures.items() if text
    )


def test_every_family_is_traced() -> None:
    assert set(PUBLISHED) == set(FAMILIES)
    assert {name: config.model_type for name, config in PUBLISHED.items()} == {name: name for name in FAMILIES}


def test_the_page_on_accelerators_lists_what_is_traced() -> None:
    assert as_markdown() in (ROOT / "docs" / "accelerators.md").read_text()
