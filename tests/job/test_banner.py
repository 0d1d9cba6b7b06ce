"""A job prints at its start what it is about to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.support.jobs import finished, inline_config, run_job
from tests.support.quantized_folders import quantize_to_fp8
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from spmdrl.engines.models.make_model import make_char_tokenizer
from spmdrl.observability.terminal.units import count


@pytest.mark.ranks
def test_a_job_names_model_ranks_data_and_folder_before_its_first_step(tmp_path: Path, device: torch.device):
    job = finished(run_job("train", inline_config(tmp_path), f"run.dir={tmp_path / 'run'}", "sft.max_steps=1", ranks=2))
    before_sft, _, rest = job.stdout.partition("sft step 1/1")
    before_grpo = rest.partition("grpo step 1/3")[0]
    model = tmp_path / "run" / "warm_start" / "initial_model"
    with safe_open(model / "model.safetensors", framework="pt") as weights:
        size = count(sum(weights.get_tensor(name).numel() for name in weights.keys()))
    assert f"model  {model} (random weights) | {size} parameters | stored float32, computed float32 | " in before_sft
    assert "stops at '<eos>' (2)" in before_sft
    assert "optim  supervised, all weights, lr 1e-05 (constant)" in before_sft
    assert "optim  rewards, all weights, lr 0.001 (constant)" in before_grpo
    assert "40 rows | 256 rows per step | 1 steps = 6.4 passes over the rows" in before_sft
    name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    assert f"ranks  2 ranks on 1 node | {name}" in before_grpo
    assert "update shard 2 | generation 2 replicas" in before_grpo
    assert "8 prompts x 4 responses = 32 samples per step | 3 steps = 0.6 passes over the rows" in before_grpo
    assert f"run    {tmp_path / 'run'} | grpo | seed 0 | a checkpoint at the end" in before_grpo
    assert "NOTE" not in job.stdout and re.search(r"checkpoint of step 3: .* in .*step_000003", rest)


def test_a_job_notes_that_it_computes_in_another_dtype_than_the_files(tmp_path: Path):
    job = finished(
        run_job("sft", inline_config(tmp_path), f"run.dir={tmp_path}", "sft.max_steps=1", "model.dtype=bfloat16")
    )
    assert "NOTE: the weights are stored in float32 and computed in bfloat16" in job.stdout


def test_a_job_trains_the_decoder_of_a_quantized_multimodal_folder_and_saves_it_in_its_own_dtype(tmp_path: Path):
    folder, sizes = tmp_path / "model", {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    tower = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    text = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128}
    config = Gemma3Config(text_config=sizes | text, vision_config=sizes | tower, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    make_char_tokenizer(folder)
    quantize_to_fp8(folder, block=(8, 16))
    model, run = ("model.make=null", f"model.path={folder}"), tmp_path / "run"
    job = finished(run_job("sft", inline_config(tmp_path), *model, f"run.dir={run}", "sft.max_steps=1"))
    assert "| stored fp8, computed float32 |" in job.stdout
    left_out = "NOTE: weights of other parts than the decoder are neither trained nor saved: "
    assert job.stdout.count(left_out) == 1
    assert re.search(left_out + r"\d+ of vision_tower.\*, 2 of multi_modal_projector.\*\n", job.stdout)
    saved = run / "checkpoints" / "step_000001" / "model"
    copy, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert copy.config.model_type == "gemma3_text" and copy.dtype is torch.float32
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert getattr(copy.config, "quantization_config", None) is None
