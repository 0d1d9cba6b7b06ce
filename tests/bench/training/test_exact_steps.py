"""The bench of exact steps runs jobs with and without the mode in turn."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main
from tests.bench.training import exact_steps


@pytest.mark.slow
@pytest.mark.cpu_only(reason="the batch-invariant operations are a CPU's")
def test_the_exact_bench_prints_ratios_and_finds_no_mismatch(tmp_path, capsys, monkeypatch):
    tiny = exact_steps.MODELS["quickstart"] | {
        "model.make": "{hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, max_positions: 64}",
        "rollout.prompts_per_step": 2,
    }
    monkeypatch.setitem(exact_steps.MODELS, "quickstart", tiny)
    out = tmp_path / "out.json"
    arguments = ["exact", "--model", "quickstart", "--steps", "2", "--ranks", "1", "--rounds", "1"]
    assert main([*arguments, "--json", str(out)]) == 0
    assert "exact / fast: step" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["mismatch/abs_max"] == 0 and found["ratios"]["step"] > 0
    passes = {(row["seconds"], row["updates per step"]): row["old_logprobs"] for row in found["rows"]}
    assert passes["fast", 2] > 0 and passes["exact", 2] == passes["fast", 1] == 0
