"""A decoder cut over the tensor axis against the whole one: on paper, then on gloo ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.parallel.tensor_parallel import (
    apply_tensor_parallel,
    check_tensor_parallel,
    is_first,
    sum_tensor_gradients,
)
from spmdrl.engines.parallel.weight_cuts import Parts, VocabularyPart
from spmdrl.engines.training.heads import LogprobHead, ValueHead
from spmdrl.nouns.settings.model_sizes import KeySizes, MoeConfig, WindowConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import Axis, build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.tiny import CONFIG, LATENT, axis_of, fill, packed, part_of
from tests.support.chosen_device import chosen_device
from tests.support.ranks import run_ranks

# 17 tokens divide by nothing; on 4 ranks each of the 2 key heads is held twice.
DENSE = replace(CONFIG, model_type="llama", intermediate_size=12, attention_bias=True, mlp_bias=True)
TIED = replace(DENSE, tied_head=True, attention_bias=False)
SINKS = replace(TIED, attention_sinks=True, window=WindowConfig(3, layers=(0,)))
# Two key heads with values of their own, then one for both.
SHARED_KEYS = replace(
    TIED,
    attention_bias=True,
    v_norm=True,
    norm_offset=0.0,
    output_norms=True,
    scales_layers=True,
    window=WindowConfig(3, layers=(0,)),
    full=KeySizes(head_size=6, num_kv_heads=1, are_values=True),
    logit_softcap=2.0,
)
SPARSE = replace(DENSE, moe=MoeConfig(num_experts=5, experts_per_token=2, intermediate_size=8, normalize=True))
# All of DeepSeek-V3: latent attention, a dense layer, then one with groups of experts and a shared one.
DEEPSEEK = replace(
    LATENT,
    model_type="llama",
    attention_bias=True,
    mlp_bias=True,
    moe=MoeConfig(
        num_experts=6,
        experts_per_token=2,
        intermediate_size=8,
        scoring="sigmoid",
        num_groups=3,
        groups_per_token=2,
        num_shared_experts=1,
        dense_layers=(0,),
    ),
)
LENGTHS = (5, 7, 4)
TEMPERATURE = 0.7


def cut_decoder(config: DecoderConfig, axis: Axis) -> tuple[Decoder, Parts]:
    with torch.device("meta"):
        decoder = Decoder(config)
    parts = Parts.of(decoder)
    apply_tensor_parallel(decoder, axis, parts)
    return decoder, parts


class Balance:
    """A route that changes nothing and adds up an auxiliary loss."""

    def __init__(self) -> None:
        self.loss = torch.zeros((), device=chosen_device())

    def __call__(self, layer: int, scores_TE: Tensor, chosen_TC: Tensor) -> tuple[Tensor, Tensor]:
        self.loss = self.loss + scores_TE.square().sum()
        return scores_TE, chosen_TC


def rate(decoder: Decoder, axis: Axis) -> dict[str, Tensor]:
    """Log-probs, entropies and the gradient of a loss of both, before any sum over the axis."""
    generator = torch.Generator().manual_seed(1)
    tokens_T = torch.randint(0, decoder.config.vocab_size, (sum(LENGTHS),), generator=generator).to(chosen_device())
    positions_T, attend = packed(LENGTHS)
    places_P = (positions_T[1:] > 0).nonzero().flatten()
    head = LogprobHead(
        places_P,
        tokens_T[places_P + 1],
        VocabularyPart.of(decoder.config.vocab_size, axis),
        TEMPERATURE,
        decoder.config.logit_softcap,
    )
    balance = Balance()
    logprobs_P, entropy_P = decoder(tokens_T, positions_T, attend, head, balance)
    pulls_P = torch.randn(len(places_P), generator=generator).to(chosen_device())
    loss = (pulls_P * logprobs_P).sum() - 0.3 * (pulls_P.flip(0) * entropy_P).sum()
    # Each rank routes all tokens, so the auxiliary loss must be shared out.
    (loss + balance.loss / axis.size).backward()
    return {"logprobs": logprobs_P.detach().cpu(), "entropy": entropy_P.detach().cpu(), "loss": loss.detach().cpu()}


def gradients_of(decoder: Decoder) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}


def _rated_in_parts(world: World, config: DecoderConfig):
    axis = build_update_mesh(UpdateLayout(shard=1, tensor=world.size), world.device, world.rank).tensor
    decoder, parts = cut_decoder(config, axis)
    outputs = rate(fill(decoder, parts), axis)
    # So few bytes that several sums are needed.
    sum_tensor_gradients(gradients_of(decoder), parts, axis, sum_bytes=200)
    return outputs, {name: (parts.slices[name], gradient.cpu()) for name, gradient in gradients_of(decoder).items()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("config", "num_ranks"), [(DENSE, 4), (TIED, 2), (SINKS, 4), (SHARED_KEYS, 2), (SPARSE, 2), (DEEPSEEK, 4)]
)
def test_a_cut_decoder_computes_what_the_whole_one_does(config, num_ranks):
    alone = axis_of("tensor")
    whole = fill(*cut_decoder(config, alone))
    outputs = rate(whole, alone)
    gradients = gradients_of(whole)
    for outputs_here, gradients_here in run_ranks(num_ranks, _rated_in_parts, config):
        for name, expected in outputs.items():
            torch.testing.assert_close(outputs_here[name], expected, rtol=1e-5, atol=1e-5, msg=name)
        assert set(gradients_here) == set(gradients)
        for name, (box, gradient) in gradients_here.items():
            expected = part_of(gradients[name].cpu(), box)
            assert gradients[name].any(), name
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("config", [DENSE, TIED, SINKS, SHARED_KEYS, SPARSE, DEEPSEEK])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_first_holders_hold_every_element_once(config, num_ranks):
    held = {}
    for rank in range(num_ranks):
        axis = axis_of("tensor", num_ranks, rank)
        decoder, parts = cut_decoder(config, axis)
        for name, tensor in decoder.state_dict().items():
            box = parts.slices[name]
            assert tuple(tensor.shape) == box.shape and tensor.is_meta
            count = held.setdefault(name, torch.zeros(parts.shapes[name]))
            if is_first(name, axis, parts):
                part_of(count, box).add_(1)
    assert all(bool((count == 1).all()) for count in held.values())
    with torch.device("meta"):
        assert list(held) == list(Decoder(config).state_dict())


@pytest.mark.parametrize(
    ("config", "tensor", "complaint"),
    [
        (DENSE, 3, "num_attention_heads 4"),
        (replace(DENSE, intermediate_size=13), 2, "intermediate_size 13"),
        (replace(DEEPSEEK, intermediate_size=13), 2, "intermediate_size 13"),
        (replace(DENSE, num_heads=12, num_kv_heads=4), 6, "num_key_value_heads 4"),
        (replace(DENSE, vocab_size=9), 4, "vocab_size 9"),
        (replace(SPARSE, num_heads=16, num_kv_heads=8), 16, "moe_intermediate_size 8"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_degrees_that_do(config, tensor, complaint):
    with pytest.raises(
        ValueError, match=rf"resources.generation.tensor is {tensor}, but .*{complaint}.*; set"
    ) as refusal:
        check_tensor_parallel(config, tensor, "resources.generation.tensor")
    usable = str(refusal.value).split("one of ")[1].strip("[]").split(", ")
    assert usable[0] == "1"
    for degree in map(int, usable):
        check_tensor_parallel(config, degree, "resources.generation.tensor")


def _valued_in_parts(world: World):
    axis = build_update_mesh(UpdateLayout(shard=1, tensor=world.size), world.device, world.rank).tensor
    hidden_TD, weight_VD = (x.to(world.device.torch_device) for x in _value_inputs())
    own_TD = hidden_TD.chunk(axis.size)[axis.rank].clone().requires_grad_()
    weight_VD.requires_grad_()
    (values_P,) = ValueHead(torch.tensor([5, 0, 3], device=own_TD.device), axis)(own_TD, weight_VD)
    (values_P * torch.tensor([1.0, 2.0, 4.0], device=own_TD.device)).sum().backward()
    return values_P.detach().cpu(), own_TD.grad.cpu(), weight_VD.grad.cpu()


def _value_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 4, generator=generator), torch.randn(1, 4, generator=generator)


@pytest.mark.ranks
def test_values_of_split_tokens_have_gradients_that_add_up():
    hidden_TD, weight_VD = _value_inputs()
    expected_P = (hidden_TD @ weight_VD[0])[[5, 0, 3]]
    by_value_T = torch.zeros(8).index_put((torch.tensor([5, 0, 3]),), torch.tensor([1.0, 2.0, 4.0]))
    answers = run_ranks(2, _valued_in_parts)
    for values_P, _, _ in answers:
        torch.testing.assert_close(values_P, expected_P)
    by_hidden_TD = torch.cat([by_hidden for _, by_hidden, _ in answers])
    torch.testing.assert_close(by_hidden_TD, by_value_T[:, None] * weight_VD)
    torch.testing.assert_close(sum(by_weight for _, _, by_weight in answers), by_value_T[None] @ hidden_TD)
