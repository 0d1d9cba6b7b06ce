"""docs/metrics.md names every metric that a run records, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from spmdrl.engines.generation.protocol import ENDS
from tests.support.jobs import ROOT, finished, metrics_of, run_job, tiny_config

ROW = re.compile(r"^\| `([^`]+)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
KINDS = ("mean", "total", "maximum", "minimum", "alike")
# What the jobs of this test don't do: accelerators and other nodes, failures, routers with a bias, pairs, teachers.
ELSEWHERE = {
    "mem/{stage}_held_gib", "mem/{stage}_peak_gib", "mem/total_gib", "checkpoint/failed", "reward/errors/{verdict}",
    "reward/programs/{verdict}", "reward/quarantined",
    "router/bias_abs_max", "log/refused_writes", "log/warnings", "environment/turns", "environment/tokens",
    "environment/pieces", "environment/ends/{reason}", "environment/seconds", "environment/open_seconds",
    "environment/seconds/{tool}", "environment/errors/{tool}",
    "eval/loss", "preference/accuracy", "preference/margin", "preference/chosen", "preference/rejected",
    "teacher/kl", "teacher/divergence", "refill/attempts", "refill/prompts", "refill/unfilled",
    "judge/unread", "judge/unasked", "fusion/waited_seconds/{stage}", "fusion/hidden_seconds/{stage}",
    "fusion/hidden_share", "fusion/hideable_seconds/generation",
}  # fmt: skip
# Sparse, several updates per step, reference, critic, correction, rollouts over several steps: what records most.
MUCH = (
    "model.make={model_type: qwen3_moe, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 1, intermediate_size: 64, moe_intermediate_size: 32, num_experts: 4, "
    "num_experts_per_tok: 2, max_position_embeddings: 32, "
    "chars: '0123456789+= '}",
    "critic={}",
    "train.updates_per_step=2", "algo={name: ppo, kl_coef: 0.01, kl_target: 1.0}", "algo.rollout_is=tis",
    "algo.off_policy_bound=0.5",
    "sft.max_steps=1", "sft.rows_per_step=8",
    "train.routing.aux_loss_coefficient=0.01", "reshard.swap=always",
    "checkpoint.interval=1", "eval.before_train=true", "eval.max_rows=4", "eval.num_samples=2",
    "data.eval=synthetic://addition?low=0&high=9&count=10",
)  # fmt: skip


def _documented() -> dict[str, re.Pattern[str]]:
    names = [name for name, *_ in ROW.findall((ROOT / "docs/metrics.md").read_text())]
    assert len(names) == len(set(names)) > 70
    return {name: _pattern(name) for name in names}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(name)))


def _fits(name: str, documented: dict[str, re.Pattern[str]]) -> bool:
    return any(known.fullmatch(name) for known in documented.values())


def _recorded_in(tree: ast.AST) -> list[str]:
    """First arguments of the recorder's methods, with `{n}` where an f-string has a value."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    first = [
        call.args[0]
        for call in calls
        if call.func.attr in KINDS and "recorder" in ast.unparse(call.func.value) and call.args  # type: ignore[attr-defined]
    ]
    literals = [node for node in first if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return [re.sub(r"\{[^}]*\}", "{n}", ast.unparse(node).removeprefix("f").strip("'\"")) for node in literals]


def test_every_name_in_the_source_is_documented():
    documented = _documented()
    names = {name for path in (ROOT / "src").rglob("*.py") for name in _recorded_in(ast.parse(path.read_text()))}
    assert len(names) > 40
    missing = {
        name for name in names if not (_fits(name, documented) or any(map(_pattern(name).fullmatch, documented)))
    }
    assert missing == set()


def test_every_row_has_a_unit_or_none_a_sentence_and_a_file_that_is_there():
    for name, _, what, files in ROW.findall((ROOT / "docs/metrics.md").read_text()):
        assert len(what.split()) >= 2, name
        assert all((ROOT / "src/spmdrl" / file.strip()).is_file() for file in files.split(",")), f"{name}: {files}"


def test_every_reason_for_the_end_of_a_row_is_documented():
    (what,) = (what for name, _, what, _ in ROW.findall((ROOT / "docs/metrics.md").read_text()) if "/ends/" in name)
    assert set(re.findall(r"`([a-z_]+)`", what)) == set(ENDS)


@pytest.mark.ranks
def test_every_metric_of_a_job_is_documented_and_every_documented_one_is_recorded(tmp_path: Path):
    run = tmp_path / "run"
    finished(run_job("train", tiny_config(tmp_path), *MUCH, f"run.dir={run}", ranks=2))
    steps = [*metrics_of(run), *metrics_of(run / "warm_start")]
    recorded = {name for step in steps for name in step} - {"step"}
    documented = _documented()
    assert {name for name in recorded if not _fits(name, documented)} == set()
    unused = {name for name, known in documented.items() if not any(map(known.fullmatch, recorded))}
    assert unused - ELSEWHERE == set()
