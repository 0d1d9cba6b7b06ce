"""The step bench runs a job of its own and a peer in turn."""

from __future__ import annotations

import json
import sys

import pytest

from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.settings.model_config import MakeConfig
from tests.bench.__main__ import main
from tests.bench.training.step import peer_steps

PEER = """
import json
print('loading')
for step in range(3):
    print(json.dumps({'step': step, 'ete': 2.0, 'gen': 1.0, 'update': 0.5, 'tok_s': 10.0 * (step + 1)}))
print(json.dumps({'done': True}))
"""


def test_a_peers_lines_after_warm_up_are_read_under_our_names(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    steps = peer_steps([sys.executable, str(script)])
    assert [step["tokens_per_second_per_device"] for step in steps] == [20.0, 30.0]
    assert steps[0]["generation"] == 1.0


def test_a_setting_without_a_value_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["step", "--model", "m", "--prompts", "p", "--settings", "model.dtype"])
    assert "'model.dtype' has no key=value" in capsys.readouterr().err


@pytest.mark.slow
def test_the_step_bench_prints_ratios_and_writes_json(tmp_path, capsys):
    script, prompts, model, out = (tmp_path / name for name in ("peer.py", "prompts.jsonl", "model", "out.json"))
    script.write_text(PEER)
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    make_model_folder(
        model, MakeConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1), seed=0
    )
    sizes = ["--prompts-per-step", "2", "--num-generations", "2", "--length", "8", "--steps", "3", "--ranks", "1"]
    arguments = ["step", "--model", str(model), "--prompts", str(prompts), *sizes]
    arguments += ["--settings", "optim.lr=1e-5", "train.updates_per_step=2"]
    assert main([*arguments, "--peer", f"{sys.executable} {script}", "--json", str(out)]) == 0
    assert "peer / spmdrl" in capsys.readouterr().out
    rows = {row["quantity"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["step"]["peer"] == 2.0 and rows["step"]["spmdrl"] > 0
    assert rows["step"]["peer / spmdrl"] == pytest.approx(2.0 / rows["step"]["spmdrl"])
    found = json.loads(out.read_text())["ratios"]
    assert found.keys() == {"step", "generation", "update"} and found["step"] == rows["step"]["peer / spmdrl"]
