"""The training bench runs the engine and plain PyTorch on the same rows."""

from __future__ import annotations

import json

import pytest
import torch

from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.settings.model_config import MakeConfig
from tests.bench.__main__ import main
from tests.bench.harness.bench_models import LAYOUT_MODELS, write_model
from tests.bench.training.plain_training import similar_batches
from tests.bench.training.training import RowSizes, make_rows

SIZES = RowSizes(rows=40, mean_length=30.0, spread=0.7, longest=100)


def test_plain_batches_hold_every_target_once_within_the_budget():
    rows = make_rows(50, SIZES)
    batches = similar_batches(rows, 128, torch.device("cpu"))
    assert all(batch.tokens.numel() <= 128 for batch in batches)
    labels = torch.cat([batch.labels[batch.labels >= 0] for batch in batches])
    is_response = torch.cat(
        [torch.arange(length) >= prompt for length, prompt in zip(rows.lengths_B, rows.prompt_lengths_B, strict=True)]
    )
    assert torch.equal(labels.sort().values, rows.tokens_T[is_response].sort().values)


def test_lengths_are_long_tailed_and_have_the_mean_asked_for():
    lengths = make_rows(50, RowSizes(rows=2000, mean_length=30.0, spread=0.7, longest=1000)).lengths_B
    assert float(lengths.float().mean()) == pytest.approx(30.0, rel=0.05)
    assert float(lengths.float().median()) < 26.0


@pytest.mark.slow
def test_the_training_bench_prints_ratios_and_writes_json(tmp_path, capsys):
    model, sinks, out = tmp_path / "model", tmp_path / "sinks", tmp_path / "out.json"
    make_model_folder(
        model, MakeConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1), seed=0
    )
    write_model(sinks, LAYOUT_MODELS["sinks"])
    sizes = ["--rows", "12", "--mean-length", "30", "--longest", "90", "--max-tokens", "128", "--rounds", "1"]
    assert main(["training", "--models", f"{model},{sinks}", *sizes, "--device", "cpu", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "times as fast as plain PyTorch" in shown and f"our update of {sinks} / {model}" in shown
    content = json.loads(out.read_text())
    assert [row["model"] for row in content["rows"]] == [str(model)] * 2 + [str(sinks)] * 2
    assert content["ratios"].keys() == {str(model), str(sinks)} and content["beside_first"].keys() == {str(sinks)}
