"""The decoding step of `rollout.compile` becomes kernels for Hopper, by Inductor, Triton and ptxas, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.accelerators.fake_cuda import guarded_environment, why_not
from tests.support.jobs import ROOT


@pytest.mark.slow
def test_a_decoding_step_compiles_for_hopper(tmp_path: Path) -> None:
    if find_spec("triton") is None:
        pytest.skip("triton isn't installed; it comes with torch's CUDA builds")
    if reason := why_not():
        pytest.skip(reason)
    python_path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.accelerators.hopper_steps", "qwen2"],
        env=guarded_environment() | caches | {"PYTHONPATH": os.pathsep.join(python_path)},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])["qwen2"]
    assert all(".target sm_90" in ptx for ptx in kernels.values())
    # The embedding with the first norm, the rotation and the feed-forward are fused; products are the library's.
    for fused in ("embedding", "cos", "silu"):
        assert any(fused in name for name in kernels), list(kernels)
