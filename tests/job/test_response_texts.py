"""Whole jobs: what rewards and records read of a response, and which ids are never sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job

from spmdrl.engines.generation.replay import read_rollouts
from spmdrl.engines.models.make_model import MakeConfig, make_model_folder

MARKS = """
def marks(completions, **columns):
    return [float("<bos>" in text or "<unk>" in text) for text in completions]
"""


def samples_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kept", ["keep", "skip"])
def test_special_tokens_are_kept_for_rewards_and_records_unless_they_are_skipped(kept: str, tmp_path: Path) -> None:
    (tmp_path / "marks.py").write_text(MARKS)
    settings = [f"reward.functions=[{tmp_path / 'marks.py'}:marks]", f"reward.special_tokens={kept}"]
    settings += ["train.max_steps=1", "log.samples_per_step=32", f"run.dir={tmp_path / 'run'}"]
    finished(run_job("train", inline_config(tmp_path), *settings))
    for sample in samples_of(tmp_path):
        marked = "<bos>" in sample["response"] or "<unk>" in sample["response"]
        assert sample["reward"] == marked
        assert "<pad>" not in sample["response"] and "<eos>" not in sample["response"]
    assert any(sample["reward"] for sample in samples_of(tmp_path)) == (kept == "keep")


def test_ids_without_a_token_are_counted_at_the_start_and_never_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make = MakeConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                      intermediate_size=64,
                      max_position_embeddings=32, chars="0123456789+=abcdefghij")  # fmt: skip
    make_model_folder(folder, make, 0)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    gaps = {vocab.pop(letter) for letter in "abcdefghij"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = [f"model.path={folder}", "model.make=null", "train.max_steps=1", f"run.dir={tmp_path / 'run'}"]
    settings += [f"debug.rollouts_to={tmp_path / 'rows'}", "rollout.top_p=0.99"]
    job = finished(run_job("train", inline_config(tmp_path), *settings))
    assert f"vocabulary: 10 of the model's {len(vocab) + 10} ids have no token; they are never sampled\n" in job.stdout
    assert (
        "NOTE: log-probs are trained as they are without rollout.top_p=0.99, by which tokens are sampled" in job.stdout
    )
    [rows] = map(read_rollouts, (tmp_path / "rows").rglob("*.safetensors"))
    drawn = [token for _, response in rows.values() for token in response.token_ids]
    assert drawn and not gaps & set(drawn)
    assert all(step["mismatch/abs_max"] < 1e-4 for step in metrics_of(tmp_path / "run"))
