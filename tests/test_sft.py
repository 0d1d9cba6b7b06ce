"""Supervised training refuses answers that the model can't learn before it begins."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from spmdrl.engines.models.making.make_config import MakeConfig
from spmdrl.engines.models.making.make_model import make_model_folder
from tests.support.jobs import run_job


@pytest.mark.parametrize(("column", "place"), [("answer", "the answer of row"), ("prompt", "rows.jsonl:2")])
def test_rows_with_tokens_that_the_model_has_no_embedding_for_are_named(tmp_path, column, place):
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    make_model_folder(model, MakeConfig(hidden_size=16, num_layers=1, max_positions=32, chars="0123456789+="), seed=0)
    tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens.add_special_tokens(["<think>"])
    tokens.save(str(model / "tokenizer.json"))
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"} | {column: "<think>4"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.path={model}", f"data.train={data}", "sft.max_steps=2", f"run.dir={tmp_path / 'run'}"]
    job = run_job("sft", *settings, timeout=120)
    assert job.returncode == 2, job.stdout + job.stderr
    assert place in job.stderr and "token 16 ('<think>'), but the model's vocabulary ends at 15" in job.stderr
    assert "Traceback" not in job.stderr and job.stderr.count("spmdrl: ") == 1
