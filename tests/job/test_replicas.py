"""Jobs whose generation replicas have several ranks: they learn and answer what replicas of one rank do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job
from tests.support.ranks import run_ranks

from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.job.start.start_checks import check_run
from spmdrl.resources.world import World

SETTINGS = ["train.max_steps=2", "reshard.verify=true"]
SPARSE = ["model.make.model_type=qwen3_moe", "model.make.num_experts=4"]
HELD_OUT = "data.eval=synthetic://addition?low=0&high=9&count=5&split=test"
LEARNT = ("reward", "loss", "grad_norm", "entropy", "completions/mean_length", "generation/tokens", "perf/tokens")


def trained(folder: Path, *settings: str) -> list[dict]:
    """The metrics of a tiny run on 2 ranks, whose banner counts its replicas."""
    job = finished(run_job("train", inline_config(folder.parent), f"run.dir={folder}", *SETTINGS, *settings, ranks=2))
    num_replicas = 1 if "resources.generation.tensor=2" in settings else 2
    assert re.search(rf"\| generation .*\b{num_replicas} replicas? \|", job.stdout), job.stdout
    return metrics_of(folder)


def check_same(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected) == 2
    for step, other in zip(found, expected, strict=True):
        for name in LEARNT:
            assert step[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (step["step"], name)
        assert step["mismatch/abs_mean"] < 1e-4
    assert all(abs(step["loss"]) > 1e-4 and step["grad_norm"] > 1e-2 for step in expected), "nothing was compared"


@pytest.mark.ranks
def test_a_replica_of_two_ranks_learns_what_two_replicas_do_and_its_first_rank_records(tmp_path):
    expected = trained(tmp_path / "two", HELD_OUT)
    dump = tmp_path / "rollouts"
    found = trained(tmp_path / "one", HELD_OUT, "resources.generation.tensor=2", f"debug.rollouts_to={dump}")
    check_same(found, expected)
    assert found[-1]["eval/accuracy"] == expected[-1]["eval/accuracy"]
    answers = [(tmp_path / run / "eval" / "step_000002.jsonl").read_text() for run in ("one", "two")]
    assert answers[0] == answers[1] and len(answers[0].splitlines()) == 5
    assert [path.name for path in sorted(dump.iterdir())] == [
        f"step_00000{step}.part_00000.safetensors" for step in (1, 2)
    ]
    replayed = trained(tmp_path / "again", "resources.generation.tensor=2", f"debug.rollouts_from={dump}")
    for name in LEARNT:
        assert [step[name] for step in replayed] == [step[name] for step in found], name


@pytest.mark.ranks
@pytest.mark.slow
def test_experts_that_are_spread_learn_what_whole_ones_do(tmp_path):
    replay = [*SPARSE, "train.routing.replay=rollout", "resources.update.expert=2"]
    expected = trained(tmp_path / "whole", *replay)
    for tensor in (1, 2):
        spread = ["resources.generation.expert=2", f"resources.generation.tensor={tensor}"]
        check_same(trained(tmp_path / f"tensor_{tensor}", *replay, *spread), expected)


@pytest.mark.ranks
@pytest.mark.slow
def test_generate_gives_each_answer_once_on_any_replicas(tmp_path):
    config = inline_config(tmp_path)
    answers = {}
    for ranks, tensor in ((1, 1), (2, 1), (2, 2)):
        folder = tmp_path / f"{ranks}_{tensor}"
        layout = f"resources.generation.tensor={tensor}"
        finished(run_job("generate", config, HELD_OUT, layout, f"run.dir={folder}", ranks=ranks))
        [path] = folder.glob("generate/*/generated.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        answers[ranks, tensor] = [(record["row"], record["prompt"], record["response"]) for record in records]
    assert [row for row, *_ in answers[1, 1]] == list(range(5))
    assert answers[1, 1] == answers[2, 1] == answers[2, 2]


def refusals(world: World, cases: list[list[str]]) -> list[str]:
    return [refusal(["data.train=synthetic://addition?count=10", *settings]) for settings in cases]


def refusal(settings: list[str]) -> str:
    try:
        check_run(load_config([], settings), "train")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_models_and_engines_that_do_not_suit_the_generation_layout_are_refused_before_ranks_communicate():
    key, sparse, vllm = (
        "resources.generation",
        "model.make={model_type: qwen3_moe, num_experts: 6}",
        "rollout.engine=vllm",
    )
    cases = [
        (["model.make={num_key_value_heads: 1}", f"{key}.tensor=4"], "^$"),
        (
            ["model.make={num_attention_heads: 2}", f"{key}.tensor=4"],
            "generation.tensor is 4, but .*num_attention_heads 2",
        ),
        (["model.make={}", f"{key}.expert=2"], "generation.expert is 2, but the model has no experts; set it to 1"),
        ([sparse, f"{key}.expert=4"], "generation.expert is 4, but it must divide the model's 6 experts"),
        ([sparse, f"{key}.expert=2"], "^$"),
        ([sparse, f"{key}.expert=2", vllm], "generation.expert is 2, but rollout.engine vllm .*; set it to 1"),
        (["model.make={}", f"{key}={{tensor: 2, tensor_stride: 2}}", vllm], "tensor_stride is 2.*; set it to 0 or 1"),
        (["model.make={}", f"{key}={{tensor: 2, tensor_stride: 1}}", vllm], "^$|vllm, which isn't installed"),
        ([sparse, "train.routing.replay=rollout", vllm], "train.routing.replay is rollout, but rollout.engine vllm"),
    ]
    for found in run_ranks(4, refusals, [settings for settings, _ in cases]):
        for (settings, words), message in zip(cases, found, strict=True):
            assert re.search(words, message), (settings, message)
