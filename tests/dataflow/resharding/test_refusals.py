"""Generators whose weights aren't the trainers': all ranks stop before any of them generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from spmdrl.dataflow.resharding.filling import all_elements, spots
from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.nouns.roles import POLICY
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.resources.memory import MemoryLedger
from spmdrl.resources.world import World
from tests.dataflow.resharding.engines import SmallGenerator, SmallTrainer, StreamedGenerator, make_model
from tests.support.ranks import run_ranks

NAME = "1.inner.weight"
ROWS = slice(0, 4)  # of the first of two ranks; the others, 4 to 8, are of the second

Damage = Callable[[Tensor, Tensor], None]
"""what is done to the weight filled, given also the one of the switch before"""


def skip(weight: Tensor, before: Tensor) -> None:
    weight[ROWS] = -7.0


def swap(weight: Tensor, before: Tensor) -> None:
    weight[ROWS], weight[4:8] = weight[4:8].clone(), weight[ROWS].clone()


def leave_stale(weight: Tensor, before: Tensor) -> None:
    weight[ROWS] = before[ROWS]


def flip(weight: Tensor, before: Tensor) -> None:
    weight[ROWS] = weight[ROWS].flip(0)


def flip_one_bit(weight: Tensor, before: Tensor) -> None:
    weight.view(torch.int32)[2, 3] ^= 1


class DamagedGenerator(SmallGenerator):
    """Its second filling doesn't end as it was sent."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], damage: Damage):
        super().__init__(shapes)
        self.damage = damage
        self.before: Tensor | None = None

    def wake_cache(self) -> None:
        super().wake_cache()
        if self.before is not None:
            self.damage(self.weights[NAME], self.before)
        self.before = self.weights[NAME].clone()


class ForgetfulGenerator(SmallGenerator):
    """Shows no storage for one of its weights."""

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().wake_weights(names).items() if name != NAME}


class UnversionedGenerator(SmallGenerator):
    """Stays at the version at which it was made."""

    version = property(lambda self: 0, lambda self, version: None)


class HastyGenerator(StreamedGenerator):
    """Stops before the last weight."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        super().load_weights(islice(weights, len(self.shapes) - 1))


def make_trainer(world: World) -> SmallTrainer:
    return SmallTrainer(make_model(), init_device_mesh(world.device.kind, (world.size,)))


def make_flow(world: World, trainer: SmallTrainer, generator: SmallGenerator, directory: str, **config):
    reshard = ReshardConfig(bucket_bytes=256, **config)
    return ReshardingFlow(world, {POLICY: trainer}, generator, reshard, MemoryLedger(), Path(directory))


def shapes_of(trainer: SmallTrainer) -> dict[str, tuple[int, ...]]:
    return {name: shard.global_shape for name, shard in trainer.named_shards().items()}


def refusal_of_second_switch(world: World, flow: ReshardingFlow, trainer: SmallTrainer) -> str:
    flow.to_generation()
    flow.to_update()
    trainer.train(torch.full((2, 5), 1.0 + world.rank))
    with pytest.raises(RuntimeError) as caught:
        flow.to_generation()
    return str(caught.value)


def refuse_damage(world: World, directory: str, damage: Damage, config: dict) -> str:
    trainer = make_trainer(world)
    make = DamagedGenerator if world.rank == 1 else lambda shapes, damage: SmallGenerator(shapes)
    flow = make_flow(world, trainer, make(shapes_of(trainer), damage), directory, **config)
    return refusal_of_second_switch(world, flow, trainer)


@pytest.mark.ranks
@pytest.mark.parametrize("executor", ["exact", "allgather"])
@pytest.mark.parametrize("damage", [skip, swap, leave_stale, flip])
def test_a_slice_that_is_skipped_swapped_stale_or_flipped_is_refused_on_every_rank(tmp_path, damage, executor):
    messages = run_ranks(2, refuse_damage, str(tmp_path), damage, {"executor": executor})
    assert all("generation weights differ from the trainer's" in message for message in messages)
    assert "none on this rank" in messages[0] and f"name='{NAME}'" in messages[1]


@pytest.mark.ranks
def test_one_flipped_bit_is_refused_on_every_rank_when_all_elements_are_summed(tmp_path):
    messages = run_ranks(2, refuse_damage, str(tmp_path), flip_one_bit, {"verify": True})
    assert "1 faults on the worst rank (0 here" in messages[0] and f"name='{NAME}'" in messages[1]


def refuse_kinds_of_generators(world: World, directory: str) -> list[str]:
    messages = []
    for kind in (ForgetfulGenerator, UnversionedGenerator, HastyGenerator):
        trainer = make_trainer(world)
        sound = StreamedGenerator if kind is HastyGenerator else SmallGenerator
        trainer.update_count = 3
        flow = make_flow(world, trainer, (kind if world.rank == 1 else sound)(shapes_of(trainer)), directory)
        with pytest.raises(RuntimeError) as caught:
            flow.to_generation()
        messages.append(str(caught.value))
    return messages


@pytest.mark.ranks
def test_missing_storage_another_version_and_an_early_stop_are_refused_on_every_rank(tmp_path):
    other, faulty = run_ranks(2, refuse_kinds_of_generators, str(tmp_path))
    assert all("none on this rank" in message for message in other)
    assert f"{NAME}: shown None" in faulty[0]
    assert "generator is at version 0, the trainer 3" in faulty[1]
    assert "1.outer.bias wasn't taken; load_weights must use up its iterator" in faulty[2]


def test_over_the_versions_every_element_is_a_spot():
    values = torch.arange(7 * 30).view(7, 30)
    seen = [values[spots(values.shape, version)].flatten().tolist() for version in range(60)]
    assert {number for numbers in seen for number in numbers} == set(range(7 * 30))
    assert all(0 < len(numbers) <= 16 for numbers in seen)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_sum_of_all_elements_knows_each_bit_and_each_place(dtype):
    values = torch.linspace(-3, 3, 2_500_000).view(1250, 2000)[:, 1:]
    digest = all_elements(values, dtype)
    assert digest.numel() > 1 and torch.equal(digest, all_elements(values.clone(), dtype))
    changed = values.clone()
    changed[700, 900] = -changed[700, 900]
    assert not torch.equal(digest, all_elements(changed, dtype))
    moved = values.clone()
    moved[[3, 1200]] = moved[[1200, 3]]
    assert not torch.equal(digest, all_elements(moved, dtype))
