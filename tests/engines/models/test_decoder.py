from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from spmdrl.engines.models.decoder import Decoder, DecoderConfig, LayerSpan
from spmdrl.engines.models.hf.model_folder import parameter_shapes, read_config
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.engines.models.make_model import RandomWeights, decoder_config
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.resources.device import BACKENDS
from tests.engines.models.support import load_decoder, packed_logits, random_rows
from tests.support.chosen_device import chosen_device, chosen_kind

FAMILIES = [
    pytest.param(Qwen3Config, {"head_dim": 16}, id="qwen3"),
    pytest.param(Qwen3Config, {"head_dim": 8, "attention_bias": True}, id="qwen3-bias"),
    pytest.param(Qwen2Config, {}, id="qwen2"),
    pytest.param(LlamaConfig, {"head_dim": 8, "rms_norm_eps": 1e-5}, id="llama"),
    pytest.param(LlamaConfig, {"attention_bias": True, "num_key_value_heads": 4}, id="llama-bias"),
]


def tiny_model(config_class: Any, extra: dict[str, Any], *, tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape = {**sizes, "num_key_value_heads": 2, "max_position_embeddings": 128, **extra}
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    config = config_class(**shape, tie_word_embeddings=tied, rope_parameters=rope, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            # Norms and biases start constant, which would hide that one of them is missing.
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model.eval()


@pytest.mark.parametrize(("config_class", "extra"), FAMILIES)
def test_parameter_shapes_are_transformers_own(config_class: Any, extra: dict[str, Any], tmp_path: Path) -> None:
    theirs = tiny_model(config_class, extra, tied=False)
    theirs.save_pretrained(tmp_path)
    shapes = {name: tuple(weight.shape) for name, weight in theirs.named_parameters()}
    assert parameter_shapes(read_config(tmp_path)) == shapes


def test_bfloat16_logits_stay_near_the_exact_ones(tmp_path: Path) -> None:
    tiny_model(Qwen3Config, {}, tied=True).save_pretrained(tmp_path)
    rows = random_rows([9], vocab_size=61)
    decoder = load_decoder(tmp_path)
    exact = packed_logits(decoder, rows)[0]
    rounded = packed_logits(decoder.to(torch.bfloat16), rows)[0]
    assert rounded.dtype is torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.1 * exact.abs().max()


def test_sharding_in_bfloat16_leaves_the_rotation_in_float32(tmp_path: Path) -> None:
    tiny_model(Qwen3Config, {}, tied=True).save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    decoder.layers[0].mixer.register_forward_pre_hook(
        lambda module, inputs: seen.append((inputs[0].dtype, inputs[1].of(decoder.config.mixers[0].rope).cos.dtype))
    )
    dist.init_process_group(BACKENDS[chosen_kind()], store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(chosen_kind(), (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(decoder, mesh=mesh, mp_policy=policy)
        packed_logits(decoder, random_rows([9], vocab_size=61))
    finally:
        dist.destroy_process_group()
    assert seen == [(torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3, "head_size": 8}, "4 is not a multiple of num_key_value_heads 3"),
        ({"num_heads": 4, "num_kv_heads": 2, "head_size": 7}, "head_dim 7 is odd"),
    ],
)
def test_impossible_heads_are_refused_with_their_numbers(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(
            model_type="llama",
            vocab_size=10,
            hidden_size=32,
            intermediate_size=32,
            num_layers=1,
            rms_eps=1e-6,
            rope_theta=1e4,
            qk_norm=False,
            attention_bias=False,
            tied_head=True,
            max_positions=16,
            **sizes,
        )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_spans_in_a_row_are_the_whole_decoder(family: str, tied: bool) -> None:
    config = decoder_config(
        MakeConfig(model_type=family, hidden_size=32, intermediate_size=24, tie_word_embeddings=tied)
    )
    weights = RandomWeights(config, seed=0)

    def filled(span: LayerSpan | None) -> Decoder:
        decoder = Decoder(config, span)
        decoder.load_state_dict({name: weights(name) for name in decoder.state_dict()})
        return decoder.to(chosen_device())

    spans = [LayerSpan(0, 1, True, False), LayerSpan(1, 3, False, False), LayerSpan(3, 4, False, True)]
    parts = [filled(span) for span in spans]
    names = [name for part in parts for name in part.state_dict()]
    assert set(names) == set(weights.names) and len(names) == len(weights.names) + tied
    assert [layer.mixer.layer for part in parts for layer in part.layers] == [0, 1, 2, 3]

    positions_T = torch.cat((torch.arange(4), torch.arange(5))).to(chosen_device())
    tokens_T = torch.randint(config.vocab_size, (9,)).to(chosen_device())
    attend = PackedCausalAttention(offsets_of([4, 5]))
    passed = tokens_T
    for part in parts:
        passed = part(passed, positions_T, attend, torch.nn.functional.linear)
    assert torch.equal(passed, filled(None)(tokens_T, positions_T, attend, torch.nn.functional.linear))
