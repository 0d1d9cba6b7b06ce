"""Storages that are freed, taken back one by one, and borrowed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from spmdrl.engines.generation.native.engine_weights import FreeableWeights, PackedWeights
from spmdrl.engines.models.decoder import Decoder
from tests.engines.generation.support import TINY


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.empty(2))

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values) * self.scale


@pytest.fixture
def held(device: torch.device) -> tuple[Scaled, FreeableWeights]:
    with torch.device("meta"):
        module = Scaled()
    return module, FreeableWeights(module, device, torch.float32)


def fill(weights: FreeableWeights) -> None:
    for name, value in {"linear.weight": 1.0, "linear.bias": 2.0, "scale": 3.0}.items():
        weights.wake()[name].fill_(value)


def test_weights_wake_one_by_one(held, device):
    module, weights = held
    assert weights.num_bytes == 0 and not weights.are_awake
    weights.wake(["scale"])
    assert weights.num_bytes == 8 and not weights.are_awake
    weights.wake(["linear.bias", "scale"]), weights.wake(["linear.weight"])
    assert weights.num_bytes == 40 and weights.are_awake
    parameter = module.linear.weight
    for _ in range(2):
        fill(weights)
        assert module(torch.ones(3, device=device)).tolist() == [15.0, 15.0] and module.linear.weight is parameter
        weights.sleep()
        assert weights.num_bytes == 0


@pytest.mark.on_device
@pytest.mark.parametrize("name", ["linear.weight", "scale"])
def test_what_is_borrowed_is_read_where_it_lies_and_left_alone(held, device, name):
    module, weights = held
    fill(weights)
    lender = torch.full((2, 3) if name == "linear.weight" else (2,), 10.0, device=device)
    for value in (10.0, 20.0):
        lender.fill_(value)
        weights.borrow({name: lender})
        assert weights.wake()[name].data_ptr() == lender.data_ptr() and weights.num_bytes == 40 - lender.nbytes
        expected = (3 * value + 2) * 3 if name == "linear.weight" else 5 * value
        assert weights.are_awake and module(torch.ones(3, device=device)).tolist() == [expected, expected]
        weights.sleep()
        assert lender.tolist() == torch.full_like(lender, value).tolist()
        fill(weights)
        assert module(torch.ones(3, device=device)).tolist() == [15.0, 15.0]


def test_what_is_kept_stays_over_a_sleep_and_the_rest_goes(held, device):
    module, weights = held
    fill(weights)
    weights.keep(["linear.weight", "linear.bias"])
    for value in (3.0, 5.0):
        weights.sleep()
        assert weights.num_bytes == 32 and not weights.are_awake
        weights.wake()["scale"].fill_(value)
        assert module(torch.ones(3, device=device)).tolist() == [5 * value, 5 * value]


def test_what_is_borrowed_or_asleep_can_not_be_kept(held, device):
    _, weights = held
    with pytest.raises(AssertionError):
        weights.keep(["scale"])
    fill(weights)
    weights.borrow({"scale": torch.ones(2, device=device)})
    with pytest.raises(AssertionError):
        weights.keep(["scale"])


NEIGHBOURS = ("first.weight", "second.weight")


@pytest.fixture
def together(device: torch.device) -> FreeableWeights:
    with torch.device("meta"):
        module = nn.ModuleDict({"first": nn.Linear(3, 2, bias=False), "second": nn.Linear(3, 5, bias=False)})
    return FreeableWeights(module, device, torch.float32, [NEIGHBOURS])


def test_neighbours_share_a_storage_that_lasts_as_long_as_one_of_them_is_awake(together, device):
    first, second = (together.wake([name])[name] for name in NEIGHBOURS)
    assert together.num_bytes == 84 and second.data_ptr() == first.data_ptr() + first.nbytes
    first.fill_(1), second.fill_(2)
    together.borrow({NEIGHBOURS[0]: torch.zeros(2, 3, device=device)})
    assert together.num_bytes == 84 and together.wake()[NEIGHBOURS[1]].tolist() == [[2.0] * 3] * 5
    together.borrow({NEIGHBOURS[1]: torch.zeros(5, 3, device=device)})
    assert together.num_bytes == 0 and together.are_awake
    together.sleep()
    together.wake()[NEIGHBOURS[0]].fill_(7)
    together.keep(NEIGHBOURS[:1])
    together.sleep()
    assert together.num_bytes == 84 and not together.are_awake
    assert together.wake()[NEIGHBOURS[0]].tolist() == [[7.0] * 3] * 2


@pytest.mark.on_device
def test_layers_that_lie_behind_each_other_are_one_product(device):
    if device.type == "cpu":
        pytest.skip("a CPU packs them instead")
    with torch.device("meta"):
        decoder = Decoder(replace(TINY, attention_bias=True))
    weights = PackedWeights(decoder, device, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in weights.wake().values():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    attention, rows = (
        decoder.model.layers["0"].self_attn,
        torch.randn(4, TINY.hidden_size, generator=generator).to(device),
    )
    apart = [getattr(attention, name)(rows) for name in attention.joined]
    weights.pack()
    joined = attention.project(rows)
    assert len({out.untyped_storage().data_ptr() for out in joined}) == 1
    borrowed = {"model.layers.0.self_attn.k_proj.weight": attention.k_proj.weight.detach().clone()}
    weights.borrow(borrowed)
    weights.pack()
    borrowing = attention.project(rows)
    assert len({out.untyped_storage().data_ptr() for out in borrowing}) == 3
    for whole, own, other in zip(joined, apart, borrowing, strict=True):
        torch.testing.assert_close(whole, own, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(other, own, atol=1e-5, rtol=1e-5)
