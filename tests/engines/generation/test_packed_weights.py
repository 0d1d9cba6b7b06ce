"""Weights that lie packed while they are used: nothing stale is read, nothing is held twice, nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.lora import is_adapter
from spmdrl.nouns.settings.model_config import LoraConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from tests.engines.generation.schedules import FAMILIES, weights_of
from tests.engines.generation.support import prompt_of, request, run, small_rollout
from tests.support.chosen_device import chosen_device, chosen_kind

GREEDY = SamplingParams(temperature=0, max_tokens=6)
each_family = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)


def made(config: DecoderConfig, *, packs: bool, scale: float = 1.0) -> NativeEngine:
    engine = NativeEngine(config, small_rollout(pack_weights=packs), chosen_device(), torch.float32)
    fill(engine, config, scale)
    return engine


def fill(engine: NativeEngine, config: DecoderConfig, scale: float = 1.0) -> None:
    engine.load_weights((name, scale * weight) for name, weight in weights_of(config).items())
    engine.wake_cache()


def answers(engine: NativeEngine) -> dict[int, tuple[int, ...]]:
    requests = [request(prompt_of(length), [length], GREEDY) for length in (5, 9, 14)]
    return {row: response.token_ids for row, response in run(engine, requests).items()}


def weight_bytes(engine: NativeEngine) -> int:
    return engine.memory_bytes()["generation_weights"]


@pytest.mark.cpu_only(reason="no other device has a layout to pack weights in")
@each_family
def test_packed_weights_say_the_same_and_take_no_more(config) -> None:
    plain, packed = made(config, packs=False), made(config, packs=True)
    assert answers(packed) == answers(plain)
    assert all(product.is_packed for product in packed._weights.products)
    # A tied head lies packed beside the embedding that it is.
    twice = 4 * config.vocab_size * config.hidden_size if config.tied_head else 0
    assert 0 <= weight_bytes(packed) - weight_bytes(plain) - twice < 0.02 * weight_bytes(plain)


@each_family
def test_packed_weights_come_back_when_they_are_asked_for(config) -> None:
    engine = made(config, packs=True)
    before = answers(engine)
    held = {name: weight.cpu() for name, weight in engine.wake_weights().items()}
    expected = weights_of(config)
    assert held.keys() == expected.keys() and all(held[name].equal(expected[name]) for name in held)
    assert answers(engine) == before


def test_new_weights_are_used_asleep_or_not() -> None:
    config = FAMILIES["qwen3"]
    expected = {scale: answers(made(config, packs=False, scale=scale)) for scale in (1.0, -1.0)}
    assert expected[1.0] != expected[-1.0]
    engine = made(config, packs=True)
    for scale in (1.0, -1.0, 1.0):
        engine.load_weights((name, scale * weight) for name, weight in weights_of(config).items())
        assert answers(engine) == expected[scale]
    for scale in (-1.0, 1.0):
        engine.sleep()
        assert weight_bytes(engine) == 0
        fill(engine, config, scale)
        assert answers(engine) == expected[scale]


@pytest.mark.parametrize("config", [FAMILIES["llama"], FAMILIES["qwen3_moe"]], ids=["llama", "qwen3_moe"])
def test_borrowed_weights_are_packed_beside_their_lender(config) -> None:
    lent = {name: weight.to(chosen_device()) for name, weight in weights_of(config).items()}
    untouched = {name: weight.clone() for name, weight in lent.items()}
    engine = NativeEngine(config, small_rollout(), chosen_device(), torch.float32)
    expected = answers(made(config, packs=False))
    for _ in range(2):
        engine.borrow_weights(lent)
        engine.wake_cache()
        assert weight_bytes(engine) == 0
        assert answers(engine) == expected
        # Where a layout is faster, the weights are copied into it.
        assert (weight_bytes(engine) > 0) == (chosen_kind() == "cpu")
        assert all(lent[name].equal(untouched[name]) for name in lent)
        engine.sleep()
        assert weight_bytes(engine) == 0


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_weights_beside_adapters_stay_packed_while_adapters_change(name) -> None:
    config = replace(FAMILIES[name], lora=LoraConfig(rank=2))
    engine, given = made(config, packs=True), weights_of(config)
    adapters = {name for name in given if is_adapter(name)}
    first = answers(engine)
    packed = [product for product in engine._weights.products if product.is_packed]
    engine.keep_weights(given.keys() - adapters)
    for scale in (-4.0, 1.0):
        engine.sleep()
        storage = engine.wake_weights()
        for adapter in adapters:
            storage[adapter].copy_(scale * given[adapter])
        engine.wake_cache()
        expected = NativeEngine(config, small_rollout(pack_weights=False), chosen_device(), torch.float32)
        expected.load_weights((n, scale * one if n in adapters else one) for n, one in given.items())
        expected.wake_cache()
        assert answers(engine) == answers(expected)
        assert (answers(engine) == first) == (scale == 1.0)
    of_base = [product for product in packed if not any(is_adapter(n) for n in engine._weights._names(product))]
    assert of_base == [] or chosen_kind() == "cpu"
    assert all(product.is_packed for product in of_base) and len(of_base) < len(packed or [0])


def test_kept_weights_hold_beside_others_of_the_same_product_that_are_borrowed_anew() -> None:
    config = replace(FAMILIES["llama"], lora=LoraConfig(rank=2))
    engine, given = made(config, packs=True), weights_of(config)
    expected = answers(made(config, packs=False))
    # As where ranks share matrices: queries and keys are one product, but only keys aren't lent.
    lent = {name: weight.to(chosen_device()) for name, weight in given.items() if "q_proj" in name}
    assert lent
    for _ in range(3):
        engine.borrow_weights(lent)
        engine.keep_weights(given.keys() - lent.keys())
        engine.wake_cache()
        assert answers(engine) == expected
        engine.sleep()
        engine.wake_weights(())
