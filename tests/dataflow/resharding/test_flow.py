from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.nouns.roles import CRITIC, POLICY, REFERENCE
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.resources.device import Device
from spmdrl.resources.memory import MemoryLedger, release_to_system, resident_bytes
from spmdrl.resources.world import World
from spmdrl.runtime.launch import read_launch_environment
from tests.dataflow.resharding.engines import SmallGenerator, SmallTrainer, StreamedGenerator, make_model
from tests.support.chosen_device import chosen_kind
from tests.support.ranks import run_ranks


def shapes_of(trainer: SmallTrainer) -> dict[str, tuple[int, ...]]:
    return {name: shard.global_shape for name, shard in trainer.named_shards().items()}


def whole_weights(trainer: SmallTrainer) -> dict[str, Tensor]:
    """The trainer's whole weights as FSDP itself gathers them."""
    named = trainer.model.named_parameters()
    return {name: (p.full_tensor() if trainer.mesh is not None else p).detach().clone() for name, p in named}


def one_rank() -> World:
    return World(read_launch_environment({}), Device(chosen_kind()))


def make_flow(world, trainer, generator, directory, *, reference=None, **config):
    ledger = MemoryLedger()
    trainers = {POLICY: trainer} | ({} if reference is None else {REFERENCE: reference})
    flow = ReshardingFlow(world, trainers, generator, ReshardConfig(**config), ledger, Path(directory))
    return flow, ledger


def cycle(flow: ReshardingFlow) -> None:
    flow.to_generation()
    flow.start_return()
    flow.to_update()


@pytest.mark.parametrize("streamed", [False, True])
def test_one_rank_fills_the_generator_and_returns_as_it_was(tmp_path, streamed):
    trainer = SmallTrainer(make_model())
    generator = (StreamedGenerator if streamed else SmallGenerator)(shapes_of(trainer))
    flow, ledger = make_flow(one_rank(), trainer, generator, tmp_path, bucket_bytes=256, verify=True)
    trainer.train(torch.ones(2, 5))
    flow.account()
    # Elsewhere than on a CPU, AdamW keeps its counts of steps on the host.
    moments = [tensor for tensor in trainer.optimizer_tensors() if tensor.device.type == chosen_kind()]
    optimizer_bytes = sum(tensor.nbytes for tensor in moments)
    weight_bytes = ledger.bytes_of("update_weights")
    assert ledger.bytes_of("optimizer") == optimizer_bytes
    before, expected = trainer.state_bytes(), whole_weights(trainer)

    stats = flow.to_generation()
    # The one rank holds what the generator wants: it is lent, unless the engine takes copies.
    lent_bytes = 0 if streamed else weight_bytes
    assert stats.received_bytes == 0 and stats.swapped_bytes == weight_bytes + optimizer_bytes - lent_bytes
    assert all(torch.equal(generator.weights[name], weight) for name, weight in expected.items())
    assert generator.version == 1 and not trainer.weights_on_device
    out = ledger.snapshot("generation")
    assert [out.device[owner] for owner in ("optimizer", "gradients", "bucket", "kv_cache")] == [0, 0, 0, 256]
    assert out.device["update_weights"] == lent_bytes
    assert out.device["generation_weights"] == weight_bytes - lent_bytes
    assert all(tensor.untyped_storage().nbytes() for tensor in generator.weights.values())
    assert all(p.grad is None for p in trainer.model.parameters())

    flow.start_return()
    flow.to_update()
    back = ledger.snapshot("update")
    assert back.device["update_weights"] == weight_bytes and back.device["generation_weights"] == 0
    assert trainer.weights_on_device
    assert all(map(torch.equal, before, trainer.state_bytes()))
    flow.close()


def test_training_goes_on_bit_for_bit_as_without_a_swap(tmp_path):
    swapped, plain = SmallTrainer(make_model()), SmallTrainer(make_model())
    flow, _ = make_flow(one_rank(), swapped, SmallGenerator(shapes_of(swapped)), tmp_path)
    for step in range(4):
        cycle(flow)
        x = torch.full((2, 5), float(step))
        swapped.train(x), plain.train(x)
        plain.drop_gradients()
    cycle(flow)
    assert all(map(torch.equal, swapped.state_bytes(), plain.state_bytes()))


def test_a_generator_in_bfloat16_gets_rounded_float32_weights(tmp_path):
    trainer = SmallTrainer(make_model())
    generator = SmallGenerator(shapes_of(trainer), torch.bfloat16)
    flow, _ = make_flow(one_rank(), trainer, generator, tmp_path, verify=True)
    expected = whole_weights(trainer)
    flow.to_generation()
    assert all(torch.equal(generator.weights[name], weight.bfloat16()) for name, weight in expected.items())


def test_a_changed_generation_weight_is_found_and_named(tmp_path):
    trainer = SmallTrainer(make_model())
    generator = SmallGenerator(shapes_of(trainer))
    flow, _ = make_flow(one_rank(), trainer, generator, tmp_path, verify=True)
    flow.to_generation()
    flow.check_generation_weights()
    row = generator.weights["1.inner.weight"]
    for damage in (lambda: row[[0, 1]].flip(0), lambda: row[[0, 1]] + 1e-7):
        kept = row.clone()
        row[[0, 1]] = damage()
        with pytest.raises(RuntimeError, match=r"differ.*1\.inner\.weight"):
            flow.check_generation_weights()
        row.copy_(kept)
    flow.check_generation_weights()


def test_what_is_lent_is_read_in_place_and_never_freed(tmp_path):
    trainer = SmallTrainer(make_model())
    shapes = shapes_of(trainer)
    cast, kept = "0.inner.weight", "1.inner.weight"
    generator = SmallGenerator(shapes, dtypes={cast: torch.bfloat16})
    flow, _ = make_flow(one_rank(), trainer, generator, tmp_path)
    for step in range(3):
        flow.to_generation()
        shards = trainer.named_shards()
        assert generator.weights[kept].data_ptr() == shards[kept].tensor.data_ptr()
        assert generator.weights[cast].data_ptr() != shards[cast].tensor.data_ptr()
        assert [name for name, shard in shards.items() if not shard.tensor.untyped_storage().nbytes()] == [cast]
        flow.start_return()
        assert shards[kept].tensor.isfinite().all()
        flow.to_update()
        before = shards[kept].tensor.clone()
        trainer.train(torch.full((2, 5), float(step)))
        assert not torch.equal(before, trainer.named_shards()[kept].tensor)


def test_verbs_out_of_order_are_refused(tmp_path):
    trainer = SmallTrainer(make_model())
    flow, _ = make_flow(one_rank(), trainer, SmallGenerator(shapes_of(trainer)), tmp_path)
    with pytest.raises(RuntimeError, match="state 'update'.*needs 'generation'"):
        flow.start_return()
    flow.to_generation()
    with pytest.raises(RuntimeError, match="state 'generation'.*needs 'update'"):
        flow.to_generation()
    flow.to_update()
    flow.to_generation()


def test_a_generator_of_another_model_is_refused(tmp_path):
    trainer = SmallTrainer(make_model())
    generator = SmallGenerator(shapes_of(trainer) | {"0.scale": (2,), "more": (3,)})
    flow, _ = make_flow(one_rank(), trainer, generator, tmp_path)
    with pytest.raises(ValueError, match=r"2 weights.*0\.scale: wanted \(2,\), held \(1,\).*one model.path"):
        flow.to_generation()


def test_reference_weights_are_copied_out_once_and_come_back_when_needed(tmp_path):
    trainer, reference = SmallTrainer(make_model()), SmallTrainer(make_model(seed=1))
    before = reference.state_bytes()
    flow, ledger = make_flow(one_rank(), trainer, SmallGenerator(shapes_of(trainer)), tmp_path, reference=reference)
    held = ledger.bytes_of("reference_weights")
    cycle(flow)
    assert ledger.bytes_of("reference_weights") == 0 < held and not reference.weights_on_device
    for _ in range(2):
        assert flow.bring(REFERENCE).swapped_bytes == held and flow.bring(REFERENCE).swapped_bytes == 0
        assert reference.weights_on_device and all(map(torch.equal, before, reference.state_bytes()))
        with torch.no_grad():
            reference.model[0].scale.add_(1)  # frozen weights never change: this one must not reach the host copy
        assert flow.release(REFERENCE).swapped_bytes == held
    flow.bring(REFERENCE)
    assert all(map(torch.equal, before, reference.state_bytes()))


def test_another_trained_model_leaves_with_the_policy_and_returns_with_it(tmp_path):
    trainer, critic = SmallTrainer(make_model()), SmallTrainer(make_model(seed=1))
    for one in (trainer, critic):
        one.train(torch.ones(2, 5))
    before, ledger = critic.state_bytes(), MemoryLedger()
    # In another dtype, none of the policy's weights is lent.
    trainers, generator = {POLICY: trainer, CRITIC: critic}, SmallGenerator(shapes_of(trainer), torch.bfloat16)
    flow = ReshardingFlow(one_rank(), trainers, generator, ReshardConfig(), ledger, tmp_path)
    held = {owner: ledger.bytes_of(owner) for owner in ("critic_weights", "critic_optimizer")}
    policy = sum(ledger.bytes_of(owner) for owner in ("update_weights", "optimizer"))
    stats = flow.to_generation()
    assert not critic.weights_on_device and all(ledger.bytes_of(owner) == 0 < held[owner] for owner in held)
    assert stats.swapped_bytes == sum(held.values()) + policy
    flow.start_return()
    assert flow.to_update().swapped_bytes == stats.swapped_bytes
    assert critic.weights_on_device and all(map(torch.equal, before, critic.state_bytes()))
    flow.close()


# Of odd element counts, so that what comes after one of them would be misaligned if it came right behind it.
WIDE = {"0.inner.bias": torch.float32, "1.scale": torch.float64, "1.outer.weight": torch.float32}


def switch_sharded(
    world: World, directory: str, shard_size: int, executor: str, dtype: torch.dtype, wide: dict[str, torch.dtype]
) -> dict:
    """Three cycles of training and switching with sharded weights; what the checks in the parent need."""
    mesh = init_device_mesh(world.device.kind, (world.size // shard_size, shard_size), mesh_dim_names=("data", "shard"))
    trainer, plain = (SmallTrainer(make_model(), mesh) for _ in range(2))
    generator = SmallGenerator(shapes_of(trainer), dtype, wide)
    config = {"bucket_bytes": 256, "executor": executor, "verify": True}
    flow, ledger = make_flow(world, trainer, generator, directory, **config)
    result = {"received": [], "equal": [], "version": []}
    for step in range(3):
        expected = whole_weights(trainer)
        result["received"].append(flow.to_generation().received_bytes)
        result["version"].append(generator.version)
        for name, weight in expected.items():
            result["equal"].append(torch.equal(generator.weights[name], weight.to(generator.dtypes[name])))
        flow.start_return()
        flow.to_update()
        x = torch.full((2, 5), 1.0 + step + world.rank)
        trainer.train(x), plain.train(x)
        plain.drop_gradients()
    result["state"] = all(map(torch.equal, trainer.state_bytes(), plain.state_bytes()))
    result["peak"] = ledger.snapshot("to_generation").peaks["bucket"]
    result["least"] = sum(
        (weight.numel() - trainer.named_shards()[name].tensor.numel()) * generator.dtypes[name].itemsize
        for name, weight in whole_weights(trainer).items()
    )
    flow.close()
    return result


def switch_with_both_executors(
    world: World, directory: str, shard_size: int, dtype: torch.dtype, wide: dict[str, torch.dtype]
) -> list[dict]:
    return [switch_sharded(world, directory, shard_size, executor, dtype, wide) for executor in ("exact", "allgather")]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "shard_size", "dtype", "wide"),
    [(2, 2, torch.float32, {}), (4, 2, torch.float32, {}), (4, 4, torch.bfloat16, WIDE)],
    ids=["2 shards", "2 replicas of 2 shards", "4 shards to mixed dtypes"],
)
def test_sharded_weights_arrive_whole_and_training_goes_on(tmp_path, world_size, shard_size, dtype, wide):
    ranks = run_ranks(world_size, switch_with_both_executors, str(tmp_path), shard_size, dtype, wide)
    for exact, allgather in ranks:
        for result in (exact, allgather):
            assert all(result["equal"]) and result["state"]
            assert result["version"] == [0, 1, 2]
            assert 0 < result["peak"] <= 256
        assert exact["received"] == [exact["least"]] * 3
        assert all(received >= allgather["least"] for received in allgather["received"])


def switch_after_unequal_updates(world: World, directory: str) -> str:
    trainer = SmallTrainer(make_model())
    trainer.update_count = world.rank
    flow, _ = make_flow(world, trainer, SmallGenerator(shapes_of(trainer)), directory)
    with pytest.raises(RuntimeError) as caught:
        flow.to_generation()
    return str(caught.value)


def damage_on_rank_1(world: World, directory: str) -> str:
    trainer = SmallTrainer(make_model(), init_device_mesh(world.device.kind, (world.size,)))
    generator = SmallGenerator(shapes_of(trainer))
    flow, _ = make_flow(world, trainer, generator, directory, verify=True)
    flow.to_generation()
    if world.rank == 1:
        generator.weights["0.outer.bias"][2] = 3.0
    with pytest.raises(RuntimeError) as caught:
        flow.check_generation_weights()
    return str(caught.value)


def refuse_stale_then_damaged(world: World, directory: str) -> tuple[str, str]:
    return switch_after_unequal_updates(world, directory), damage_on_rank_1(world, directory)


@pytest.mark.ranks
def test_ranks_with_stale_or_damaged_weights_all_stop(tmp_path):
    messages = run_ranks(2, refuse_stale_then_damaged, str(tmp_path))
    assert all("range from 0 to 1" in stale for stale, _ in messages)
    assert "none on this rank" in messages[0][1] and "0.outer.bias" in messages[1][1]


@pytest.mark.cpu_only(reason="device memory isn't resident memory of the process")
def test_resident_memory_drops_by_weights_and_optimizer_during_generation(tmp_path):
    trainer = SmallTrainer(make_model(width=1450, num_blocks=12))  # 50M parameters: 200 MB, and 400 MB of moments
    num_bytes = 3 * sum(p.nbytes for p in trainer.model.parameters())
    # It wants one small weight only, so that resident memory shows the trainer's part alone.
    flow, _ = make_flow(one_rank(), trainer, SmallGenerator({"0.scale": (1,)}), tmp_path)
    trainer.train(torch.zeros(1, 1450))
    trainer.drop_gradients()
    release_to_system()
    before, state = resident_bytes(), [float(chunk.float().sum()) for chunk in trainer.state_bytes()[:4]]
    release_to_system()
    flow.to_generation()
    dropped = before - resident_bytes()
    assert num_bytes > 590e6 and dropped > 0.95 * num_bytes
    flow.start_return()
    flow.to_update()
    assert [float(chunk.float().sum()) for chunk in trainer.state_bytes()[:4]] == state


def test_without_a_swap_everything_stays_and_nothing_is_copied(tmp_path):
    trainer, plain = SmallTrainer(make_model()), SmallTrainer(make_model())
    reference = SmallTrainer(make_model(seed=1))
    generator = SmallGenerator(shapes_of(trainer), dtypes={"0.inner.weight": torch.bfloat16})
    ledger = MemoryLedger()
    # No file could be made below a file.
    folder = tmp_path / "file" / "swap"
    folder.parent.write_text("")
    config = ReshardConfig(bucket_bytes=256, verify=True)
    trainers = {POLICY: trainer, REFERENCE: reference}
    flow = ReshardingFlow(one_rank(), trainers, generator, config, ledger, folder, swaps=False)
    for step in range(3):
        held = {owner: ledger.bytes_of(owner) for owner in ("update_weights", "optimizer", "reference_weights")}
        expected, before = whole_weights(trainer), trainer.state_bytes()
        stats = flow.to_generation()
        assert stats.swapped_bytes == stats.copied_bytes == 0
        assert held == {owner: ledger.bytes_of(owner) for owner in held} and all(held[name] for name in held if step)
        assert all(torch.equal(generator.weights[name], weight.to(generator.dtypes[name])) for name, weight in
                   expected.items())  # fmt: skip
        # What generation wants as it lies is lent; and the trainer still refuses to compute, as it would change it.
        assert generator.weights["1.scale"].data_ptr() == trainer.named_shards()["1.scale"].tensor.data_ptr()
        assert not trainer.weights_on_device and not reference.weights_on_device
        flow.start_return()
        assert flow.bring(REFERENCE).swapped_bytes == 0 and reference.weights_on_device
        stats = flow.to_update()
        assert stats.swapped_bytes == 0 and stats.returned is None and trainer.weights_on_device
        assert all(map(torch.equal, before, trainer.state_bytes()))
        x = torch.full((2, 5), float(step))
        trainer.train(x), plain.train(x)
        plain.drop_gradients()
        flow.account()
    assert [ledger.bytes_of(owner, "host") for owner in ("update_weights", "optimizer", "reference_weights")] == [0] * 3
    assert all(map(torch.equal, trainer.state_bytes(), plain.state_bytes()))
    flow.close()


def test_without_a_swap_a_changed_generation_weight_is_found_too(tmp_path):
    trainer = SmallTrainer(make_model())
    generator = SmallGenerator(shapes_of(trainer), torch.bfloat16)
    flow = ReshardingFlow(
        one_rank(), {POLICY: trainer}, generator, ReshardConfig(verify=True), MemoryLedger(), tmp_path, swaps=False
    )
    flow.to_generation()
    generator.weights["1.inner.weight"][0] += 1
    with pytest.raises(RuntimeError, match=r"differ.*1\.inner\.weight"):
        flow.check_generation_weights()
