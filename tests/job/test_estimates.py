"""What `check` computes from a config is what a run then holds."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from tests.support.jobs import run_job, tiny_config

from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.dataflow.resharding.planning.slice_layouts import parameter_table, update_slices
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.make_model import RandomWeights, decoder_config, make_model_folder
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.start.estimates import estimate_lines, rank_bytes
from spmdrl.job.start.prepared import prepare, source_without_making
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.roles import CRITIC, POLICY
from spmdrl.runtime.launch import LaunchEnvironment

BASE = [
    "model.make={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 64}",
    "data.train=synthetic://addition?low=0&high=9&count=40", "reward.functions=[exact]", "train.max_steps=10",
    "rollout={prompts_per_step: 8, num_generations: 4, max_completion_length: 8}",
]  # fmt: skip


def checked_for(launch: LaunchEnvironment, *overrides: str):
    return check_run(load_config([], [*BASE, *overrides]), "train", launch=launch)


def test_one_rank_holds_the_whole_model_and_eight_an_eighth_or_a_little_more():
    alone, eight = LaunchEnvironment(), LaunchEnvironment(world_size=8, local_world_size=8)
    checked = checked_for(alone)
    decoder = decoder_config(checked.config.model.make)
    table = parameter_table(decoder)
    (num_elements,) = {sum(box.num_elements for box in update_slices(table, checked.layout, 0))}
    whole = rank_bytes(checked, {POLICY: decoder}, alone, "cpu")
    assert (whole["update_weights"], whole["optimizer"]) == (4 * num_elements, 8 * num_elements)
    assert "reference_weights" not in whole and checked.roles == (POLICY,)
    with_reference = checked_for(eight, "algo.kl_coef=0.1")
    part = rank_bytes(with_reference, dict.fromkeys(with_reference.roles, decoder), eight, "cuda")
    assert num_elements / 8 * 4 <= part["update_weights"] < num_elements / 8 * 4 * 1.1
    assert part["reference_weights"] * 2 == part["update_weights"]
    assert part["generation_weights"] == 2 * num_elements
    # One replica per rank: an eighth of the rows beside the block for padding, and half the bytes per number.
    block_bytes = 2 * 2 * 32 * 16 * 4
    assert (part["kv_cache"] * 2 - block_bytes) * 8 == whole["kv_cache"] - block_bytes


def test_muons_matrices_have_one_moving_average_in_place_of_two():
    alone, eight = LaunchEnvironment(), LaunchEnvironment(world_size=8, local_world_size=8)
    checked = checked_for(alone, "optim.name=muon", "critic={}", "algo.name=ppo")
    decoder = decoder_config(checked.config.model.make)
    elements = {name: math.prod(shape) for name, shape in parameter_table(decoder).shapes.items()}
    matrices = sum(number for name, number in elements.items() if "_proj." in name)
    decoders = {POLICY: decoder, CRITIC: decoder}
    held = rank_bytes(checked, decoders, alone, "cpu")
    assert held["optimizer"] == 8 * sum(elements.values()) - 4 * matrices
    assert held["critic_optimizer"] == 8 * sum(elements.values())
    part = rank_bytes(checked_for(eight, "optim.name=muon"), {POLICY: decoder}, eight, "cpu")
    assert held["optimizer"] / 8 <= part["optimizer"] < held["optimizer"] / 8 * 1.1
    with pytest.raises(ConfigError, match="optim.name is muon, but with lora"):
        checked_for(alone, "optim.name=muon", "lora={}")


STATES = {
    "qwen3": "kv cache 368 KiB (23 blocks of 32 positions)",
    "gemma3_text": " blocks of 32 positions in windows of 20",
    "qwen3_5_text": "9 slots of recurrent states",
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, "") for family in STATES),
        *(("qwen3_5_text", one) for one in ("max_running_rows: 4", "kv_cache_gib: 0.02")),
    ],
)
def test_the_engine_allots_the_planned_cache_and_runs_the_longest_rows_at_once_in_it(family, settings):
    sizes = ", sliding_window: 20" if family == "gemma3_text" else ""
    make = f"model_type: {family}, num_hidden_layers: 4, hidden_size: 32, intermediate_size: 48{sizes}"
    checked = checked_for(
        LaunchEnvironment(), f"model.make={{{make}}}", "data.max_prompt_length=60",
        f"rollout={{prompts_per_step: 2, num_generations: 3, max_completion_length: 40, {settings}}}",
    )  # fmt: skip
    decoder, rollout = decoder_config(checked.config.model.make), checked.config.rollout
    engine = NativeEngine(decoder, rollout, torch.device("cpu"), torch.float32)
    weights = RandomWeights(decoder, seed=0)
    engine.load_weights((name, weights(name)) for name in engine.weight_shapes())
    engine.wake_cache()
    rows = [(0, 1, 2), (3, 4, 5)]
    engine.submit([Request(own, (5 + own[0],) * 60, own, rollout.sampling(())) for own in rows])
    planned = rank_bytes(checked, {POLICY: decoder}, LaunchEnvironment(), "cpu")["kv_cache"]
    assert engine.memory_bytes()["kv_cache"] == planned
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert engine.memory_bytes()["kv_cache"] == planned
    if not settings:
        # Two tokens in the first step, and no row waits or starts anew.
        assert num_steps == 39
        with source_without_making(checked.config) as source:
            lines = list(estimate_lines(checked, prepare(checked, source), LaunchEnvironment(), "cpu"))
        assert STATES[family] in lines[1]


def test_a_reference_with_a_layout_of_its_own_holds_what_that_leaves_it():
    eight = LaunchEnvironment(world_size=8, local_world_size=8)
    shared = checked_for(eight, "algo.kl_coef=0.1")
    own = checked_for(eight, "algo.kl_coef=0.1", "reference.layout={data: 8}")
    decoder = decoder_config(shared.config.model.make)
    held, held_otherwise = (
        rank_bytes(checked, dict.fromkeys(checked.roles, decoder), eight, "cuda") for checked in (shared, own)
    )
    num_elements = sum(map(math.prod, parameter_table(decoder).shapes.values()))
    assert held_otherwise == held | {"reference_weights": 2 * num_elements}
    assert held["reference_weights"] < num_elements


@pytest.mark.parametrize(
    ("verb", "settings", "said"),
    [
        ("train", ["reference.layout={tensor: 3}"], "reference.layout.tensor 3 does not divide"),
        ("train", ["reference.layout={shard: 2}"], "or set reference.layout.shard or "),
        ("train", ["reference.layout={expert: 2}"], "reference.layout.expert is 2, but the"),
        ("train", ["reference.layout={tensor: 8}"], "reference.layout.tensor is 8, but it must"),
        ("train", ["reference.layout={pipeline: 4}"], "reference.layout.pipeline 4 x "),
        ("train", ["algo.name=opd", "teacher={prompt_column: hint, layout: {tensor: 2}}"], "this run has no teacher"),
        ("train", ["reference.layout={}", "lora.rank=2"], "no reference with weights of its own"),
        ("preferences", ["reference.layout={}"], "preferences rates the rows of a step with policy and"),
    ],
)  # fmt: skip
def test_a_layout_that_a_role_can_not_have_is_refused_by_its_key(verb, settings, said, tmp_path):
    eight = LaunchEnvironment(world_size=8, local_world_size=8)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    data = [f"data.train={pairs}", "preferences.max_steps=1"] if verb == "preferences" else []
    with pytest.raises(ValueError, match=re.escape(said)):
        checked = check_run(load_config([], [*BASE, "algo.kl_coef=0.1", *data, *settings]), verb, launch=eight)
        with source_without_making(checked.config) as source:
            prepare(checked, source)


def test_a_teacher_that_the_policys_layout_can_not_cut_is_refused_in_its_own_name(tmp_path):
    two = LaunchEnvironment(world_size=2, local_world_size=2)
    make_model_folder(
        tmp_path, replace(checked_for(two).config.model.make, num_attention_heads=1, num_key_value_heads=1), seed=0
    )
    settings = ["resources.update={tensor: 2}", "algo={name: opd}", f"teacher.path={tmp_path}"]
    checked = check_run(load_config([], [*BASE, *settings]), "train", launch=two)
    with source_without_making(checked.config) as source, pytest.raises(ValueError) as refused:
        prepare(checked, source)
    assert str(refused.value).startswith(
        "for the teacher: resources.update.tensor is 2, but it must divide the model's"
    )
    assert str(refused.value).endswith("or set teacher.layout")


def test_adapters_alone_have_gradients_and_an_optimizer_and_generation_keeps_the_other_weights():
    eight = LaunchEnvironment(world_size=8, local_world_size=8)
    full, lora = checked_for(eight, "algo.kl_coef=0.1"), checked_for(eight, "algo.kl_coef=0.1", "lora.rank=2")
    decoder = decoder_config(full.config.model.make)
    adapted = replace(decoder, lora=lora.config.lora)
    whole = rank_bytes(full, dict.fromkeys(full.roles, decoder), eight, "cuda")
    part = rank_bytes(lora, dict.fromkeys(lora.roles, adapted), eight, "cuda")
    assert lora.roles == (POLICY,) and "reference_weights" not in part
    assert part["base_weights"] == whole["reference_weights"] == whole["update_weights"] // 2
    adapters = sum(math.prod(shape) for name, shape in parameter_table(adapted).shapes.items() if ".lora_" in name)
    assert 4 * adapters / 8 <= part["update_weights"] == part["gradients"] == part["optimizer"] // 2
    assert part["update_weights"] < 0.25 * whole["update_weights"]
    assert part["generation_weights"] == whole["generation_weights"] + 2 * adapters
    merged = replace(adapted, lora=replace(adapted.lora, merge=True))
    assert rank_bytes(lora, {POLICY: merged}, eight, "cuda")["generation_weights"] == whole["generation_weights"]
    with source_without_making(lora.config) as source:
        prepared = prepare(lora, source)
        lines = list(estimate_lines(lora, prepared, eight, "cpu"))
    assert lines[0].endswith(" beside them") and "base weights" in lines[1]


def test_the_lines_have_the_products_and_quotients_that_people_work_out_by_hand():
    launch = LaunchEnvironment()
    checked = checked_for(launch)
    with source_without_making(checked.config) as source:
        prepared = prepare(checked, source)
        lines = list(estimate_lines(checked, prepared, launch, "cpu"))
    assert "a step: 8 prompts x 4 responses = 32 samples, at most 384 tokens (4.0 of a prompt on average" in lines[3]
    assert "the run: 10 steps, 80 prompts = 2 epochs of 40 rows, 320 samples, 10 optimizer steps" in lines[4]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_where_a_prompt_has_one():
    checked = checked_for(LaunchEnvironment())
    with source_without_making(checked.config) as source:
        path = source.folder / "tokenizer.json"
        # The digit 7 gets an id that no embedding has.
        path.write_text(path.read_text().replace('"7": ', f'"7": {source.decoder.vocab_size}00'))
        with pytest.raises(ValueError, match="it has token .* but the model's vocabulary ends at"):
            prepare(checked, ModelSource(source.folder, source.decoder))


def test_every_folder_but_one_made_here_is_tried_before_its_tokenizer_is_loaded(tmp_path):
    checked, tried = checked_for(LaunchEnvironment()), []
    with source_without_making(checked.config) as source:
        prepare(checked, source, tried.append)
        assert tried == []
        given = replace(checked.config, model=replace(checked.config.model, make=None, path=str(source.folder)))
        prepare(replace(checked, config=given), source, tried.append)
        assert tried == [source.folder]
        (source.folder / "chat_template.jinja").write_text("{% if %}")
        with pytest.raises(ValueError, match="chat_template.jinja can't be used"):
            prepare(replace(checked, config=given), source)


def test_a_job_of_other_ranks_is_checked_without_starting_any(tmp_path):
    config = tiny_config(tmp_path)
    job = run_job("check", config, "--ranks", "8", "--nodes=2", "resources.update.tensor=2")
    assert job.returncode == 0, job.stderr
    assert "update layout: shard 4 x tensor 2" in job.stdout and "ranks: 8 on 2 nodes" in job.stdout
    job = run_job("check", config, "--ranks", "8", "resources.update.tensor=3")
    assert job.returncode == 2 and "resources.update.tensor 3 does not divide the job's 8 ranks" in job.stderr
    for words in (["--ranks", "x"], ["--ranks"], ["--ranks=0"], ["--ranks", "3", "--nodes", "2"]):
        job = run_job("check", config, *words)
        assert job.returncode == 2 and job.stderr.startswith("spmdrl: --ranks"), job.stderr
