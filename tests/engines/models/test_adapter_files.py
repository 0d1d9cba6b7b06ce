"""Adapter files open with PEFT, whose adapters belong to transformers' projections: some are several of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.models.hf.adapter_files import write_adapters
from spmdrl.engines.models.hf.model_folder import stored_forms
from spmdrl.engines.models.lora import is_adapter
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.settings.model_config import LoraConfig, MakeConfig
from tests.engines.models.support import load_decoder, packed_logits, random_rows

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "targets", "ranks"),
    [
        pytest.param("qwen3_5_text", (), {"in_proj_qkv": 9}, id="qwen3.5"),
        pytest.param("qwen3_next", (), {"in_proj_qkvz": 12, "in_proj_ba": 6}, id="qwen3-next"),
        pytest.param("qwen3_next", ("in_proj_z", "in_proj_k", "in_proj_a"), {"in_proj_qkvz": 6}, id="some parts"),
    ],
)
def test_peft_computes_what_adapters_of_the_parts_of_fused_projections_do(
    family: str, targets: tuple[str, ...], ranks: dict[str, int], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    make_model_folder(tmp_path / "model", MakeConfig(model_type=family, **SIZES), seed=0)
    plain, lora = load_decoder(tmp_path / "model"), LoraConfig(rank=3, alpha=6.0, targets=targets)
    torch.manual_seed(0)
    decoder = Decoder(replace(plain.config, lora=lora)).to(plain.model.embedding.weight.device)
    decoder.load_state_dict(plain.state_dict(), strict=False)
    adapters = {name: one.detach().cpu() for name, one in decoder.named_parameters() if is_adapter(name)}
    write_adapters(tmp_path / "adapter", adapters, lora, "model", stored_forms(decoder.config))
    rows = random_rows([5, 17], plain.config.vocab_size)
    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "adapter"
    )
    for row, mine, alone in zip(rows, packed_logits(decoder, rows), packed_logits(plain, rows), strict=True):
        torch.testing.assert_close(adapted(row[None]).logits[0], mine, rtol=1e-4, atol=1e-4)
        assert (mine - alone).abs().max() > 1e-2
    # PEFT wants exactly those that are there, in these ranks.
    wanted = {name.replace(".default", ""): one.shape for name, one in adapted.named_parameters() if "lora_" in name}
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert wanted == {name: one.shape for name, one in stored.items()}
    found = {name.split(".")[-3]: len(one) for name, one in stored.items() if ".lora_A." in name}
    assert {name: rank for name, rank in found.items() if rank != 3} == ranks
