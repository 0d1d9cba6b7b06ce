"""A chat template whose end of turn doesn't end responses is reported by the verbs that use the template."""

from __future__ import annotations

import json

import pytest
from tests.support.jobs import finished, run_job
from tokenizers import Tokenizer

from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.settings.model_config import MakeConfig

CHAT = "{% for m in messages %}{{ m.content }}{{ '<|end|>' if m.role == 'assistant' }}{% endfor %}"


@pytest.mark.parametrize(("template", "warnings"), [("auto", 1), ("never", 0)])
def test_generate_warns_of_an_end_of_turn_only_where_the_template_is_used(tmp_path, template, warnings):
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    make_model_folder(model, MakeConfig(hidden_size=16, num_hidden_layers=1, max_position_embeddings=32), seed=0)
    tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens.add_special_tokens(["<|end|>"])
    tokens.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(CHAT)
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}) + "\n")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{path: {model}}}\ndata: {{eval: {data}, chat_template: {template}}}\nrun: {{dir: {tmp_path}/run}}\n"
        "rollout: {max_completion_length: 2, kv_cache_gib: 0.01}\neval: {num_samples: 1}\n"
    )
    job = finished(run_job("generate", config, timeout=120))
    assert job.stderr.count("WARNING: the chat template ends answers with '<|end|>'") == warnings, job.stderr
