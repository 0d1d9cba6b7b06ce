"""Gated delta networks compute what transformers' do, row by row, in packs and behind shared prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from spmdrl.engines.models.delta_net import DeltaConfig, GatedDeltaNet
from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.prefixed import PrefixedRows
from spmdrl.engines.models.layers import PackedCausalAttention, SharedPromptAttention
from spmdrl.engines.models.mixers import OUTPUTS, Recurrent, Rotations
from spmdrl.nouns.batch import offsets_of
from tests.engines.models.delta_cases import SIZES, a_few_sizes, assert_near, conv_inputs, rule_inputs

LENGTHS = [1, 63, 64, 65, 130]
HIDDEN_SIZE = 20


def nets_of(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[GatedDeltaNet, Qwen3_5GatedDeltaNet]:
    """Ours, and transformers' with the same weights."""
    G, H, K, U, width = sizes
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN_SIZE, linear_num_key_heads=G, linear_num_value_heads=H, linear_key_head_dim=K,
        linear_value_head_dim=U, linear_conv_kernel_dim=width, num_hidden_layers=1, layer_types=["linear_attention"],
        rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = Qwen3_5GatedDeltaNet(config, 0)
    ours = DeltaConfig(HIDDEN_SIZE, H, G, K, U, width, 1e-5).build(0).to(dtype)
    assert isinstance(ours, GatedDeltaNet)
    with torch.no_grad():
        theirs.norm.weight.normal_(1, 0.1)
        theirs.dt_bias.normal_()
        theirs.to(dtype)
        for name, weight in weights_of(theirs, sizes).items():
            ours.get_parameter(name).copy_(weight)
    return ours, theirs


def weights_of(theirs: nn.Module, sizes: Sequence[int], *, gradients: bool = False) -> dict[str, Tensor]:
    """Weights of transformers' module, or their gradients, by our names."""
    G, H, K, U, _ = sizes
    found: dict[str, Tensor] = {}
    for name, weight in theirs.named_parameters():
        values = weight.grad if gradients else weight
        assert values is not None
        parts = {"in_proj_qkv.weight": "in_proj", "conv1d.weight": "conv"}
        if name in parts:
            of_heads = zip("qkv", values.split([G * K, G * K, H * U]), strict=True)
            found |= {f"{parts[name]}_{part}.weight": rows for part, rows in of_heads}
        else:
            found[name] = values
    return found


def hidden_states(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))


def packed(net: nn.Module, hidden_TD: Tensor, lengths: Sequence[int]) -> Tensor:
    return net(hidden_TD, Rotations(torch.zeros(len(hidden_TD)), set()), PackedCausalAttention(offsets_of(lengths)))


@a_few_sizes(others=pytest.mark.slow)
def test_outputs_and_all_gradients_are_those_of_transformers_row_by_row(kernels, sizes):
    ours, theirs = nets_of(sizes)
    own, other = (hidden_states(sum(LENGTHS)).requires_grad_() for _ in range(2))
    found = packed(ours, own, LENGTHS)
    wanted = torch.cat([theirs(row[None])[0] for row in other.split(LENGTHS)])
    assert_near([found], [wanted], 1e-5)
    pull = hidden_states(2 * len(found))[len(found) :]
    found.backward(pull)
    wanted.backward(pull)
    gradients = weights_of(theirs, sizes, gradients=True)
    names = [name for name, _ in ours.named_parameters()]
    assert sorted(gradients) == sorted(names)
    assert_near([own.grad], [other.grad], 2e-5)
    for name in names:
        # Theirs of decays are off by so much in float32, ours by less than 2e-6.
        tolerance = 3e-4 if name in ("A_log", "dt_bias", "in_proj_a.weight") else 2e-5
        assert_near([ours.get_parameter(name).grad], [gradients[name]], tolerance)


def test_qwen3_next_s_projections_are_interleaved_by_key_head():
    G, H, K, U, width = sizes = SIZES[1]
    config = Qwen3NextConfig(
        hidden_size=HIDDEN_SIZE, linear_num_key_heads=G, linear_num_value_heads=H, linear_key_head_dim=K,
        linear_value_head_dim=U, linear_conv_kernel_dim=width, num_hidden_layers=1, layer_types=["linear_attention"],
        rms_norm_eps=1e-5,
    )  # fmt: skip
    ours, _ = nets_of(sizes)
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    by_head = {name: weight.unflatten(0, (G, -1)) for name, weight in ours.state_dict().items() if "in_proj" in name}
    with torch.no_grad():
        theirs.in_proj_qkvz.weight.copy_(torch.cat([by_head[f"in_proj_{x}.weight"] for x in "qkvz"], 1).flatten(0, 1))
        theirs.in_proj_ba.weight.copy_(torch.cat([by_head[f"in_proj_{x}.weight"] for x in "ba"], 1).flatten(0, 1))
        theirs.conv1d.weight.copy_(torch.cat([ours.get_parameter(f"conv_{x}.weight") for x in "qkv"]))
        for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight"):
            theirs.get_parameter(name).copy_(ours.get_parameter(name))
    hidden = hidden_states(100)
    assert_near([packed(ours, hidden, [100]).detach()], [theirs(hidden[None])[0].detach()], 1e-5)


def test_bfloat16_rounds_where_transformers_do():
    ours, theirs = nets_of(SIZES[2], torch.bfloat16)
    hidden = hidden_states(130).to(torch.bfloat16)
    with torch.no_grad():
        found, wanted = packed(ours, hidden, [130]), theirs(hidden[None])[0]
    assert found.dtype == torch.bfloat16
    assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 1e-2


class OneTokenOfEachRow(PackedCausalAttention):
    """Decodes one token of each row, whose states are in slots."""

    def __init__(self, state: Recurrent, slots_B: Tensor):
        self._columns, self._states = torch.zeros(9, *state.columns), torch.zeros(9, *state.matrices)
        self._slots_B = slots_B

    def convolve(self, layer: int, values_TC: Tensor, weight_CW: Tensor) -> Tensor:
        return ops.conv_step(values_TC, weight_CW, self._columns, self._slots_B)

    def recur(self, layer: int, *inputs: Tensor) -> Tensor:
        return ops.gated_delta_step(*inputs, self._states, self._slots_B)


@a_few_sizes(others=pytest.mark.slow)
def test_in_the_exact_mode_a_row_has_the_same_bits_alone_in_packs_and_decoded(exact_mode, sizes):
    net, _ = nets_of(sizes)
    hidden = hidden_states(sum(LENGTHS))
    with torch.no_grad():
        found = packed(net, hidden, LENGTHS).split(LENGTHS)
        rows = hidden.split(LENGTHS)
        for row, of_pack in zip(rows, found, strict=True):
            assert torch.equal(packed(net, row.clone(), [len(row)]), of_pack)
        beside = torch.cat([row if place == 3 else torch.randn_like(row) for place, row in enumerate(rows)])
        assert torch.equal(packed(net, beside, LENGTHS).split(LENGTHS)[3], found[3])
        config = DeltaConfig(HIDDEN_SIZE, *(sizes[i] for i in (1, 0, 2, 3, 4)), 1e-5)
        attend = OneTokenOfEachRow(config.state(1), torch.tensor([7, 0, 4]))
        for step in range(63):
            tokens = torch.stack([row[step] for row in rows[1:4]])
            decoded = net(tokens, Rotations(torch.zeros(3), set()), attend)
            assert torch.equal(decoded, torch.stack([row[step] for row in found[1:4]])), step


def test_parts_by_heads_add_up_to_the_whole():
    """As tensor ranks hold them: two value heads of one key head each."""
    sizes = SIZES[1]
    whole, _ = nets_of(sizes)
    config = DeltaConfig(HIDDEN_SIZE, *(sizes[i] for i in (1, 0, 2, 3, 4)), 1e-5)
    hidden, parts = hidden_states(70), []
    for rank in range(2):
        part = DeltaConfig(HIDDEN_SIZE, *(sizes[i] // (2 if i < 2 else 1) for i in (1, 0, 2, 3, 4)), 1e-5).build(0)
        for name, weight in part.named_parameters():
            cut = config.cuts.get(name.removesuffix(".weight"))
            of_whole = whole.get_parameter(name).detach()
            weight.data = of_whole if cut is None else of_whole.chunk(2, dim=cut.side)[rank]
        parts.append(packed(part, hidden, [70]))
    assert_near([sum(parts)], [packed(whole, hidden, [70])], 5e-6)
    assert all(cut.side == OUTPUTS for name, cut in config.cuts.items() if name != "out_proj")


def test_sizes_of_qwen3_5_4b_have_its_known_state_and_cost():
    config = DeltaConfig(2560, num_heads=32, num_kv_heads=16, key_size=128, value_size=128, conv_width=4, rms_eps=1e-6)
    assert config.state(1) == Recurrent((3, 8192), (32, 128, 128))
    assert config.state(4) == Recurrent((3, 2048), (8, 128, 128))
    # Of 24 linear layers, in bfloat16: 49.125 MiB.
    state = config.state(1)
    assert 24 * (2 * 3 * 8192 + 4 * 32 * 128 * 128) == 49.125 * 2**20 and state.columns[1] == 8192
    with torch.device("meta"):
        net = config.build(0)
    matrices = sum(weight.numel() for weight in net.parameters() if weight.ndim > 1)
    assert config.num_weights == matrices + 3 * 32 * 128 * 128


# First pieces of two to 130 tokens, one without followers; rows after them with one token and more.
PREFIXES = [2, 70, 130, 1]
FOLLOWERS = [(0, 1), (0, 70), (1, 3), (1, 64), (3, 2), (3, 5)]


def test_rows_after_shared_prompts_are_whole_rows(kernels):
    pieces, lengths = zip(*FOLLOWERS, strict=True)
    rows = PrefixedRows(offsets_of(PREFIXES), lengths, pieces)
    whole = rows.whole_rows()
    tokens, starts = torch.cat(whole), offsets_of([len(row) for row in whole])
    num_tokens, sizes = sum(PREFIXES) + sum(lengths), SIZES[1]

    def mix(attend: PackedCausalAttention | SharedPromptAttention, leaves: Sequence[Tensor], index: Tensor) -> Tensor:
        values, weight, *heads = leaves
        mixed = attend.convolve(0, values[index], weight)
        return torch.cat((mixed, attend.recur(0, *(x[index] for x in heads)).flatten(1)), dim=1)

    inputs = [*conv_inputs(num_tokens, 1, sizes)[:2], *rule_inputs(num_tokens, 1, sizes)[:5]]
    shared, alone = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    found = mix(SharedPromptAttention(rows), shared, torch.arange(num_tokens))
    wanted = mix(PackedCausalAttention(starts), alone, tokens)
    assert_near([found[tokens]], [wanted])
    pull = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5))
    # What pulls at a shared token are all of its copies.
    pulls = torch.zeros_like(found).index_add(0, tokens, pull)
    assert_near(torch.autograd.grad(found, shared, pulls), torch.autograd.grad(wanted, alone, pull), 5e-6)
