"""Whole runs with adapters: alike on two ranks and after a crash, and what they leave behind is whole models."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.support.jobs import finished, inline_config, metrics_of, run_job, untimed
from torch import Tensor

from spmdrl.engines.models.hf.adapter_files import StoredAdapters
from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.job.model.model_source import ModelSource
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.model_config import LoraConfig

# A reference without a second model, a critic whose weights are all trained, and a switch that moves all it can.
TINY = [
    "lora={rank: 3, alpha: 6}", "algo={name: ppo, kl_coef: 0.05}", "critic={optim: {lr: 1e-3}}", "optim.lr=1e-2",
    "train.max_steps=4", "train.updates_per_step=2", "reshard.verify=true",
]  # fmt: skip
ADAPTER_FILE = "adapter_model.safetensors"
ALIKE = ("loss", "kl", "grad_norm", "reward", "critic/loss")


def weights_of(folder: Path, step: int, model: str = "model") -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / model / "model.safetensors")


def stored_names(folder: Path) -> set[str]:
    """The names in a checkpoint's trainer state."""
    return {key for path in folder.glob("shards_*") for key in safe_open(path, "pt").keys()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of four steps on two ranks with the swap."""
    folder = tmp_path_factory.mktemp("lora")
    settings = [f"run.dir={folder / 'run'}", "checkpoint.interval=2", "reshard.swap=always"]
    finished(run_job("train", inline_config(folder), *TINY, *settings, ranks=2))
    return folder


@pytest.mark.ranks
def test_one_rank_and_two_with_the_swap_train_the_same_adapters(whole, tmp_path):
    run = tmp_path / "run"
    finished(run_job("train", inline_config(tmp_path), *TINY, "train.max_steps=2", f"run.dir={run}"))
    for alone, together in zip(metrics_of(run), metrics_of(whole / "run"), strict=False):
        assert {name: alone[name] for name in ALIKE} == pytest.approx({name: together[name] for name in ALIKE}, 1e-4)
        assert together["mismatch/abs_max"] < 1e-4
    expected = weights_of(whole / "run", 2)
    for name, weight in weights_of(run, 2).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks
def test_after_the_first_switch_each_rank_receives_the_adapters_that_it_lacks_and_nothing_else(whole):
    run = whole / "run"
    num_bytes = 4 * sum(
        one.numel() for name, one in load_file(run / "initial_model/model.safetensors").items() if "norm" not in name
    )
    adapters = sum(adapter_elements(run).values())
    first, *later = [step["reshard/bytes"] for step in metrics_of(run)]
    # Each rank has one half of everything and wants the other, float32 here.
    assert later == [4 * adapters] * 3 and num_bytes < first < 1.1 * (num_bytes + later[0])
    assert json.loads((run / "summary.json").read_text())["resharding"] == {"first_bytes": first, "bytes": later[0]}


@pytest.mark.ranks
def test_the_models_own_weights_are_copied_to_the_host_once_and_have_no_optimizer(whole):
    run = whole / "run"
    lines = [json.loads(line) for line in (run / "timeline/rank_00000.jsonl").read_text().splitlines()]
    # Held on the device (d) and on the host (o), at the boundary before the first generation.
    held = next(record for record in lines if record.get("h", [""])[0] == "to_generation")
    assert held["d"]["base_weights"] == held["d"]["update_weights"] == 0
    adapters = sum(adapter_elements(run).values())
    assert held["o"]["update_weights"] >= 4 * adapters / 2 and held["o"]["base_weights"] > held["o"]["update_weights"]
    assert held["o"]["optimizer"] < 1.1 * 2 * held["o"]["update_weights"]
    to_host = [sum(moved[1] for moved in record.get("m", ()) if moved[0] == "to_host") for record in lines]
    switches = [num_bytes for num_bytes in to_host if num_bytes]
    assert switches[0] - switches[1] > 0.9 * held["o"]["base_weights"]


def adapter_elements(run: Path) -> dict[str, int]:
    """Elements of each adapter of rank 3 beside the projections of a run's model."""
    shapes = {name: one.shape for name, one in load_file(run / "initial_model/model.safetensors").items()}
    return {name: 3 * sum(shape) for name, shape in shapes.items() if "_proj." in name}


@pytest.mark.ranks
def test_generation_with_merged_weights_trains_the_same(whole, tmp_path):
    run = tmp_path / "run"
    settings = ["lora.merge=true", "train.max_steps=2", "reshard.swap=always", f"run.dir={run}"]
    finished(run_job("train", inline_config(tmp_path), *TINY, *settings, ranks=2))
    for merged, unmerged in zip(metrics_of(run), metrics_of(whole / "run"), strict=False):
        assert {name: merged[name] for name in ALIKE} == pytest.approx({name: unmerged[name] for name in ALIKE}, 1e-4)
        assert merged["mismatch/abs_max"] < 1e-4
    assert len({step["reshard/bytes"] for step in metrics_of(run)}) == 1


@pytest.mark.ranks
def test_the_reference_is_the_model_that_the_run_began_with(whole):
    divergences = [step["kl"] for step in metrics_of(whole / "run")]
    assert abs(divergences[0]) < 1e-6 < 1e-4 < abs(divergences[1])


@pytest.mark.ranks
def test_a_checkpoint_holds_merged_weights_and_the_state_of_adapters_alone(whole):
    run = whole / "run"
    initial, trained = load_file(run / "initial_model/model.safetensors"), weights_of(run, 4)
    assert trained.keys() == initial.keys()
    changed = {name for name in initial if not torch.equal(trained[name], initial[name])}
    assert changed == {name for name in initial if "_proj." in name}
    state = stored_names(run / "checkpoints/step_000004/trainer")
    assert all(".lora_" in name for name in state - {"step/step"}) and len(state) == 1 + 3 * 2 * len(changed)


@pytest.mark.ranks
def test_adapter_files_beside_the_first_model_make_the_merged_one(whole):
    run = whole / "run"
    initial, trained = load_file(run / "initial_model/model.safetensors"), weights_of(run, 4)
    folder = run / "checkpoints/step_000004/adapter"
    config, adapters = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / ADAPTER_FILE)
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert config["peft_type"] == "LORA" and set(config["target_modules"]) == projections
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 6, str(run / "initial_model"))
    for name, weight in initial.items():
        expected, path = weight.double().numpy(), f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" in adapters:
            up, down = (adapters.pop(f"{path}.lora_{letter}.weight").double().numpy() for letter in "AB")
            expected = expected + config["lora_alpha"] / config["r"] * down @ up
        np.testing.assert_allclose(trained[name].numpy(), expected, rtol=0, atol=1e-6)
    assert not adapters


@pytest.mark.ranks
def test_peft_opens_the_adapter_files_and_computes_what_merged_weights_do(whole):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = whole / "run/checkpoints/step_000004"
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(whole / "run/initial_model", dtype=torch.float32)
    tokens = torch.tensor([[1, 5, 7, 9, 4, 11]])
    alone = base(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter")
    expected = merged(tokens).logits
    torch.testing.assert_close(adapted(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert (alone - expected).abs().max() > 1e-3
    # Without complaint about keys: PEFT wants exactly those that are there.
    wanted = {name.replace(".default", "") for name, _ in adapted.named_parameters() if "lora_" in name}
    assert wanted == load_file(folder / "adapter" / ADAPTER_FILE).keys()


@pytest.mark.ranks
def test_a_run_that_died_goes_on_with_the_same_adapters_to_the_last_bit(whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    # As if the job had died before the last checkpoint was written.
    shutil.rmtree(run / "checkpoints/step_000004")
    settings = [f"run.dir={run}", "checkpoint.interval=2", "reshard.swap=always"]
    resumed = finished(run_job("train", inline_config(tmp_path), *TINY, *settings, ranks=2))
    assert "resumed from" in resumed.stdout
    for model in ("model", "critic/model"):
        found, expected = weights_of(run, 4, model), weights_of(whole / "run", 4, model)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    moved = "reshard/"
    for again, first in zip(untimed(metrics_of(run)), untimed(metrics_of(whole / "run")), strict=True):
        assert {k: v for k, v in again.items() if moved not in k} == {k: v for k, v in first.items() if moved not in k}


ONE_STEP = ["lora={rank: 3, alpha: 6}", "optim.lr=0", "train.max_steps=1", "model.make=null"]


@pytest.mark.ranks
def test_a_run_begins_with_the_adapters_of_another_and_their_base(whole, tmp_path):
    folder = whole / "run/checkpoints/step_000004"
    settings = [*ONE_STEP, f"model.path={folder / 'adapter'}", f"run.dir={tmp_path / 'run'}", "reshard.verify=true"]
    finished(run_job("train", inline_config(tmp_path), *settings, ranks=2))
    found, expected = weights_of(tmp_path / "run", 1), weights_of(whole / "run", 4)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    written = load_file(tmp_path / "run/checkpoints/step_000001/adapter" / ADAPTER_FILE)
    assert all(torch.equal(written[name], one) for name, one in load_file(folder / "adapter" / ADAPTER_FILE).items())
    # Only the adapters that a run began with are gone on with.
    other = tmp_path / "other"
    shutil.copytree(folder / "adapter", other)
    shutil.copy(whole / "run/checkpoints/step_000002/adapter" / ADAPTER_FILE, other)
    settings[settings.index(f"model.path={folder / 'adapter'}")] = f"model.path={other}"
    refused = run_job("train", inline_config(tmp_path), *settings, "train.max_steps=2")
    assert refused.returncode == 2 and "the adapters at the start was" in refused.stderr


@pytest.mark.ranks
def test_a_run_begins_with_adapters_that_peft_has_written(whole, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base, adapter = whole / "run/initial_model", tmp_path / "adapter"
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    adapted.save_pretrained(adapter)
    tokens = torch.tensor([[1, 5, 7, 9, 4, 11]])
    settings = [*ONE_STEP, f"model.path={adapter}", f"run.dir={tmp_path / 'run'}"]
    refused = run_job("train", inline_config(tmp_path), *settings)
    own = "lora={rank: 2, alpha: 8, targets: [down_proj, q_proj]}"
    assert refused.returncode == 2 and f"need {own}" in refused.stderr
    finished(run_job("train", inline_config(tmp_path), *settings, own))
    model = tmp_path / "run/checkpoints/step_000001/model"
    merged = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-5, atol=1e-5)
    # Without training they are merged: as by PEFT, and in the slices of two ranks.
    source, by_peft = ModelSource.of(adapter), adapted.merge_and_unload().state_dict()
    for name, shape in parameter_shapes(source.decoder).items():
        torch.testing.assert_close(source.initial_weights().read(whole_slice(name, shape)), by_peft[name])
    greedy = ["rollout.temperature=0", "rollout.max_completion_length=8", "rollout.ignore_eos=true"]
    prompts = ["prompt=1+1=", "prompt=23+45=", *greedy, f"run.dir={tmp_path / 'answers'}"]
    cut = ["resources.generation.tensor=2", f"model.path={adapter}"]
    answers = [
        finished(run_job("generate", *prompts, *settings, ranks=ranks)).stdout.partition("> ")[2]
        for settings, ranks in ((cut, 2), ([f"model.path={model}"], 1), ([f"model.path={base}"], 1))
    ]
    assert answers[0] == answers[1] != answers[2]
    (adapter / ADAPTER_FILE).write_bytes((whole / "run/checkpoints/step_000002/adapter" / ADAPTER_FILE).read_bytes())
    other = run_job("generate", *prompts, f"model.path={adapter}")
    assert other.returncode == 2 and "has the shape" in other.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True, but only False can be trained here"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is {'q_proj': 8}"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": None}, "no adapters that can be read"),
    ],
)
def test_adapters_of_another_kind_are_refused_by_name(change, message, tmp_path):
    content = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 3, "lora_alpha": 6, "lora_dropout": 0.1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content | change))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(3, 8)}, tmp_path / ADAPTER_FILE)
    with pytest.raises(ValueError, match=message):
        StoredAdapters(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    assert StoredAdapters(tmp_path).lora == LoraConfig(rank=3, alpha=6.0, targets=("q_proj",))


@pytest.mark.ranks
@pytest.mark.parametrize("lora", ["lora.rank=4", "lora=null", "lora.targets=[q_proj]"])
def test_a_run_is_not_gone_on_with_under_other_adapters(whole, tmp_path, lora):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    refused = run_job("train", inline_config(tmp_path), *TINY, lora, "train.max_steps=6", f"run.dir={tmp_path / 'run'}")
    assert refused.returncode == 2 and "lora was 'rank 3, alpha 6, all projections' and is" in refused.stderr


def test_online_dpo_begins_with_pairs_that_policy_and_reference_find_alike(tmp_path):
    run = tmp_path / "run"
    settings = ["lora={}", "algo.name=online_dpo", "optim.lr=1e-2", "train.max_steps=2", f"run.dir={run}"]
    finished(run_job("train", inline_config(tmp_path), *settings))
    first, second = metrics_of(run)
    # -log sigmoid(0), as adapters that are off are those that haven't learnt yet.
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(second["loss"] - math.log(2)) > 1e-3


def test_a_supervised_start_is_merged_into_the_model_that_training_with_rewards_begins_with(tmp_path):
    run = tmp_path / "run"
    settings = ["lora.targets=[q_proj,v_proj]", "sft={max_steps: 2, optim: {lr: 1e-2}}", "algo.kl_coef=0.1"]
    job = finished(run_job("train", inline_config(tmp_path), *settings, "train.max_steps=1", f"run.dir={run}"))
    assert "scale 32 / 32 | q_proj, v_proj" in job.stdout
    warm = run / "warm_start"
    started, initial = weights_of(warm, 2), load_file(warm / "initial_model/model.safetensors")
    changed = {name for name in initial if not torch.equal(started[name], initial[name])}
    assert changed == {name for name in initial if "q_proj." in name or "v_proj." in name}
    assert metrics_of(run)[0]["kl"] == 0
    assert json.loads((run / "summary.json").read_text())["parameters"] == sum(one.numel() for one in initial.values())
