"""Models beside the policy, rank sets, engines and devices in plans and in what plans propose."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.jobs import ROOT, run_job

from spmdrl.config.config import load_config
from spmdrl.engines.models.hf.model_folder import compute_dtype, parameter_shapes
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.roles import JUDGE, POLICY, REFERENCE, WorkerState
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.plan import alternatives
from spmdrl.plan.account import Span
from spmdrl.plan.advice import candidates, settings_text, with_settings
from spmdrl.plan.alternatives import _rank_sets, _update_layouts, on_more_nodes
from spmdrl.plan.planned_device import NAME
from spmdrl.plan.rank_plan import GenerationTrace, Shared, rank_classes, slots_of, swaps
from spmdrl.plan.run_plan import PlannedRun
from spmdrl.plan.traced_rank import RankTrace, SlotTrace
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.verbs.planned_run import planned_run

QUICKSTART = ROOT / "configs/debug/quickstart.yaml"
CALCULATOR = ROOT / "configs/recipes/calculator/train.yaml"
SETS = ("resources.ranks.generation=2", "rollout.lag=1")


def run_of(*settings: str, ranks: int, device: str = "h100", file: Path = QUICKSTART) -> PlannedRun:
    loaded = load_config([file], settings, "train")
    return planned_run(loaded, LaunchEnvironment(0, ranks, 0, ranks), device, None, None, None)


@pytest.fixture
def judge(tmp_path: Path) -> str:
    make_model_folder(
        tmp_path / "judge", MakeConfig(hidden_size=256, num_hidden_layers=3, max_position_embeddings=256), seed=0
    )
    return f"reward.judge.path={tmp_path / 'judge'}"


@pytest.mark.ranks
def test_a_judge_and_the_generation_of_vllm_are_planned(tmp_path, judge):
    file = tmp_path / "plan.json"
    words = [judge, "reward.judge.kv_cache_gib=0.25", "rollout.engine=vllm", "rollout.kv_cache_gib=0.5"]
    done = run_job("plan", str(QUICKSTART), "--ranks", "2", "--json", str(file), *words)
    assert done.returncode == 0, done.stderr
    plan = json.loads(file.read_text())
    slots = plan["ranks"][0]["slots"]
    assert list(slots) == ["switch", "generation", "judge", "update"] and {*slots} <= {*plan["stages"]}
    shapes = parameter_shapes(run_of(judge, ranks=2).sources[JUDGE].decoder).values()
    assert slots["judge"]["judge_weights"] == pytest.approx(2 * sum(map(math.prod, shapes)), rel=0.01)
    assert slots["judge"]["kv_cache"] == pytest.approx(2**28, rel=0.01)
    assert "judge_weights" not in slots["update"] and "kv_cache" not in slots["update"]
    assert slots["generation"]["kv_cache"] == pytest.approx(2**29, rel=0.01)
    (note,) = plan["notes"]
    assert "the run's is vLLM" in note and note in done.stdout


def test_the_swap_is_decided_without_a_judge_as_a_run_decides_it(judge):
    decided = []
    for words in ((), (judge,)):
        run = run_of("rollout.kv_cache_gib=0.01", "reshard.bucket_bytes=1000000", *words, ranks=1)
        rooms = range(8 << 20, 128 << 20, 2 << 20)
        decided.append([swaps(run.checked, run.sources, run.launch, room) for room in rooms])
    assert decided[0] == decided[1] and {*decided[0]} == {False, True}


def test_ranks_differ_by_the_stages_of_every_model():
    for layout, classes in (("{pipeline: 2, shard: 2}", [[0, 1], [2, 3]]), ("{shard: 4}", [[0, 1, 2, 3]])):
        run = run_of("algo.name=ppo", "critic={}", f"critic.layout={layout}", ranks=4)
        assert rank_classes(run.checked, run.sources, 4) == classes


@pytest.mark.parametrize(("engine", "is_beside"), [({"kv_cache": 100}, True), (None, False)])
def test_what_scores_while_rows_wait_for_an_environment_is_beside_the_cache(engine, is_beside):
    run = run_of("algo.kl_coef=0.01", ranks=1, file=CALCULATOR)
    slot = SlotTrace(REFERENCE, Span(Counter({"activations": 7})), 1, 0.0, 1, 1, (1, 1))
    traced = RankTrace(0, {POLICY.weights: 3, REFERENCE.weights: 5}, {WorkerState.REFERENCE: slot})
    generation = None if engine is None else GenerationTrace(engine, Span())
    for is_swapped in (False, True):
        slots = {
            one.name: one.owners
            for one in slots_of(run.checked, traced, generation, None, Shared(), is_swapped=is_swapped)
        }
        assert slots["reference"].get("kv_cache", 0) == 100 * (is_beside and not is_swapped)


def planned_with(*too_large: str, ranks: int, settings: tuple[str, ...] = ()) -> list[str]:
    """The changes proposed for a plan of which these parts are too large."""
    run = run_of(*settings, ranks=ranks)
    slots = [SimpleNamespace(name=name, peak_bytes=1 << 50, refusal="") for name in too_large]
    plan: Any = SimpleNamespace(ranks=[SimpleNamespace(slots=slots)], is_swapped=True)
    return [settings_text(change) for change in candidates(plan, run)]


def test_changes_move_degrees_of_any_number_of_ranks(judge):
    update = planned_with("update", ranks=6, settings=("resources.update.data=6", "resources.update.shard=1"))
    assert update[-4:] == [
        "resources.update.data=3 resources.update.shard=2", "resources.update.data=1 resources.update.shard=6",
        "resources.update.data=1 resources.update.shard=3 resources.update.tensor=2",
        "resources.update.data=1 resources.update.tensor=6",
    ]  # fmt: skip
    generation = planned_with("generation", ranks=6)
    assert generation[-2:] == ["resources.generation.tensor=2", "resources.generation.tensor=6"]
    judged = planned_with("judge", ranks=6, settings=(judge,))
    assert judged == [
        "reward.judge.kv_cache_gib=0.25", "reward.judge.layout.tensor=2", "reward.judge.layout.tensor=6"
    ]  # fmt: skip


def test_a_judge_is_cut_by_the_layout_that_is_proposed(judge):
    run = run_of(judge, ranks=2)
    config = with_settings(run.checked.config, [("reward.judge.layout.tensor", 2)])
    assert config.reward.judge is not None and config.reward.judge.layout is not None
    assert config.reward.judge.layout.tensor == 2


def test_a_search_beside_sets_of_ranks_cuts_those_that_train_and_tries_none():
    run = run_of(*SETS, ranks=6)
    layouts = [dict(settings) for settings in _update_layouts(run)]
    assert layouts and all(
        settings["resources.update.data"] * settings["resources.update.shard"]
        * settings["resources.update.pipeline"] * settings["resources.update.tensor"] == 4
        for settings in layouts
    )  # fmt: skip
    sets = [dict(settings) for settings in _rank_sets(run, [])]
    found = [(one["resources.ranks.generation"], one["rollout.lag"], one["resources.update.shard"]) for one in sets]
    assert found == [(3, 1, 3), (1, 1, 5), (0, 0, 6)]


def test_more_nodes_have_more_replicas_of_every_model(monkeypatch):
    monkeypatch.setattr(alternatives, "plan_run", lambda run: run)
    monkeypatch.setattr(alternatives, "MOST_DEVICES", 16)
    words = ("algo.name=ppo", "critic={}", "critic.layout={data: 2, shard: 1, tensor: 2}")
    loaded = load_config([QUICKSTART], words, "train")

    def planned(config: Any, launch: LaunchEnvironment) -> PlannedRun:
        return planned_run(replace(loaded, value=config), launch, "h100", None, None, None)

    larger = [*on_more_nodes(run_of(*words, ranks=4), planned)]
    sizes = [[cut.data * cut.shard * cut.tensor for cut in (run.checked.layout, *run.checked.own_layouts.values())]
             for run in larger]  # fmt: skip
    assert sizes == [[4, 4], [16, 16]]


@pytest.mark.parametrize("words", [("resources.device=cpu",), ()])
def test_a_run_on_cpus_is_planned_with_their_defaults(tmp_path, words):
    device = tmp_path / "cpu.yaml"
    device.write_text("{memory_gib: 1.0, kernels: cpu}\n")
    config = run_of(*words, ranks=1, device="h100" if words else str(device)).checked.config
    assert config.train.tokens_per_microbatch(NAME) == config.train.tokens_per_microbatch("cpu")
    assert compute_dtype(config.model, NAME) == torch.float32


@pytest.mark.ranks
def test_replicas_that_share_experts_fill_prompts_only_while_there_are_some(tmp_path):
    # In float32, experts' products read their sizes, where those of bfloat16 are one operator.
    settings = ("model.make.model_type=qwen3_moe", "model.dtype=float32", "resources.generation.expert=2")
    done = run_job("train", str(QUICKSTART), *settings, "--dry-run", "--ranks=2", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0 and done.stdout.startswith("fits: "), done.stderr
    sent = json.loads((tmp_path / "plan.json").read_text())["messages"]["generation"]
    # Three in each of 5 layers, as prompts are filled and for each of 6 tokens: no rank has others to fill then.
    assert sent["alltoall_base_ of 2 ranks"]["messages"] == 3 * 5 * (1 + 6)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--response-length", "100000"), "positions, but the model has"),
        (("--json", "nowhere/plan.json"), "nowhere/plan.json can't be written"),
        (("--picture", "."), "can't be written"),
        (("rollout.cuda_graphs=true", "resources.generation.tensor=2"), "a graph holds no collectives"),
        (("rollout.engine=vllm", *SETS), "opens its groups over all ranks"),
    ],
)
def test_a_plan_is_refused_before_it_is_made(words, says):
    done = run_job("plan", str(QUICKSTART), "--ranks", "4", *words)
    assert done.returncode == 2 and says in done.stderr, done.stderr
