"""The resharding flow: update shards become generation shards, and come back (the paper's allgather-swap).

    update -> to_generation() -> generation -> start_return() -> returning -> to_update() -> update

Source: MindSpeed RL (arXiv:2507.19017), "Allgather-Swap Technique", Figure 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from spmdrl.dataflow.resharding.filling import GeneratorFilling, Names, Watcher
from spmdrl.dataflow.resharding.gather import Received
from spmdrl.dataflow.resharding.planning.slice_agreement import check_same_version
from spmdrl.dataflow.resharding.swap import Leaving, Left, MakeStore, StayingSwap, Swap, TensorsByName, make_host_store
from spmdrl.dataflow.resharding.swap_space import CopyTimes
from spmdrl.engines.generation.protocol import GenerationEngine
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.memory import MemoryLedger, release_to_system
from spmdrl.resources.world import World


@dataclass(frozen=True)
class ReshardStats:
    """Costs of one switch of the flow on this rank."""

    seconds: float
    received_bytes: int = 0
    planned_bytes: int = 0
    """planned bytes received by all ranks together"""
    cross_node_bytes: int = 0
    """bytes received from other nodes"""
    move_seconds: float = 0.0
    """time in which weights were moved and left the device"""
    swapped_bytes: int = 0
    """bytes freed on the device, or brought back to it"""
    copied_bytes: int = 0
    """freed bytes that the host had no copy of yet"""
    returned: CopyTimes | None = None
    """times of the training state's copy back; set by the switch that waited for it"""
    hidden_share: float = 0.0
    """share of that copy's time that passed before the switch was called"""


# Returning a small model's pages costs more, in later page faults, than the memory is worth.
LEAST_BYTES_TO_RELEASE = 64 << 20

State = Literal["update", "generation", "returning"]


class ReshardingFlow:
    """Switch of this rank between the update and the generation layout."""

    def __init__(
        self,
        world: World,
        trainers: Mapping[Role, TrainingEngine],
        generator: GenerationEngine,
        config: ReshardConfig,
        ledger: MemoryLedger,
        directory: Path,
        *,
        swaps: bool = True,
        make_store: MakeStore = make_host_store,
    ):
        """`trainers` holds the policy, which fills the generator, and the run's other models.

        `directory` takes the temporary files of a CPU's host side. `swaps` is what `reshard.swap` resolves
        to: without it the training state stays on the device.
        """
        self._world = world
        self._policy = trainers[POLICY]
        self._trainers = trainers
        self._generator = generator
        self._config = config
        self._ledger = ledger
        self._state: State = "update"
        self._filling: GeneratorFilling | None = None
        self._kept: list[str] = []
        """weights that the generator keeps for good"""
        self.swaps = swaps
        self._swap: Swap = StayingSwap(world.device, ledger)
        if swaps:
            self._swap = Swap(world.device, ledger, directory, make_store=make_store)
        self._groups = {role: groups_of(role, trainer) for role, trainer in trainers.items()}
        for groups in self._groups.values():
            for owner, tensors in groups.items():
                self._swap.add_group(owner, tensors)
        # Frozen weights move once, to generators that show their storage and have the adapters too.
        is_shown = POLICY.base in self._groups[POLICY] and not generator.wants_iterator
        self._plans_left = 2 if is_shown and any(map(self._policy.updates, generator.weight_shapes())) else 1

    def to_generation(self) -> ReshardStats:
        """Fill and wakes the generator, and frees the training state. Collective over the world.

        Bucket by bucket, so the device holds at its peak about the larger of the two states and a bucket. Raises what
        `check_generation_weights` raises.
        """
        self._expect("update")
        started = time.perf_counter()
        check_same_version(self._policy.update_count)
        before = self._leave_without_policy_weights()
        moving = time.perf_counter()
        received, weights = self._move_weights()
        move_seconds = time.perf_counter() - moving
        self._give_back_memory(weights.freed_bytes)
        self._generator.wake_cache()
        self._generator.version = self._policy.update_count
        self._account_generator()
        self._state = "generation"
        self.check_generation_weights()
        if self._config.verify:
            # Sums over all elements leave temporary memory in the allocator.
            self._give_back_memory(LEAST_BYTES_TO_RELEASE)
        return ReshardStats(
            time.perf_counter() - started,
            received_bytes=received.total,
            planned_bytes=self._filling.planned_bytes if self._filling else 0,
            cross_node_bytes=received.cross_node,
            move_seconds=move_seconds,
            swapped_bytes=before.freed_bytes + weights.freed_bytes,
            copied_bytes=before.copied_bytes + weights.copied_bytes,
        )

    def _leave_without_policy_weights(self) -> Left:
        """Free the state of all models but the policy's weights, which leave while they are sent."""
        left: list[Left] = []
        for role in self._trainers:
            if role.presence == "stage":
                self.release(role)
        for role in self._roles_of_training():
            self._trainers[role].reshard()
            self._trainers[role].drop_gradients()
        self._ledger.set("gradients", "device", 0)
        for role in self._roles_of_training():
            trainer = self._trainers[role]
            for group in self._groups[role]:
                if group not in (POLICY.weights, POLICY.base):
                    left.append(self._swap.to_host(group, version=trainer.update_count))
                    self._give_back_memory(left[-1].freed_bytes)
            trainer.weights_on_device = role is POLICY
        return _together(left)

    def check_generation_weights(self) -> None:
        """Raise RuntimeError on every rank unless each generator holds what the trainer sent, at its update count.

        Spots of every piece are compared; with `reshard.verify`, all elements. Collective over the world.
        """
        self._expect("generation")
        assert self._filling is not None
        self._filling.check(self._policy.update_count)

    def start_return(self) -> None:
        """Put the generator to sleep and start bringing the training state back in the background."""
        self._expect("generation")
        held = sum(self._generator.memory_bytes().values())
        self._generator.sleep()
        if self._filling is not None:
            self._filling.forget_storage()
        self._account_generator()
        self._give_back_memory(held)
        for role in self._roles_of_training():
            for group in self._groups[role]:
                self._swap.start_return(group)
        self._state = "returning"

    def to_update(self) -> ReshardStats:
        """Wait for the training state, if necessary; then the trainer may compute again."""
        started = time.perf_counter()
        if self._state == "update":
            return ReshardStats(0.0)
        if self._state == "generation":
            self.start_return()
        self._expect("returning")
        returned = []
        for role in self._roles_of_training():
            returned += [self._swap.finish_return(group) for group in self._groups[role]]
            self._trainers[role].weights_on_device = True
        copied, num_bytes = returned[0].copied, sum(one.num_bytes for one in returned)
        for one in returned[1:]:
            copied = copied.joined(one.copied)
        self._state = "update"
        return ReshardStats(
            time.perf_counter() - started,
            swapped_bytes=num_bytes,
            returned=copied if num_bytes else None,
            hidden_share=copied.share_before(started),
        )

    @contextmanager
    def computing(self, role: Role) -> Iterator[None]:
        """Allow a role of training to score inside this block, even during generation if nothing is swapped."""
        trainer = self._trainers[role]
        is_generating = self._state == "generation"
        assert not (is_generating and self.swaps), f"the weights of the {role.name} are away while responses come"
        trainer.weights_on_device |= is_generating
        try:
            yield
        finally:
            trainer.weights_on_device &= not is_generating

    def bring(self, role: Role) -> ReshardStats:
        """Bring the frozen weights of a role that is present only in stages to the device, if necessary."""
        started, returned = time.perf_counter(), 0
        if not self._swap.is_on_device(role.weights):
            self._swap.start_return(role.weights)
            returned = self._swap.finish_return(role.weights).num_bytes
            self._trainers[role].weights_on_device = True
        return ReshardStats(time.perf_counter() - started, swapped_bytes=returned)

    def release(self, role: Role) -> ReshardStats:
        """Free what `bring` brought, if it is on the device; only the first time it is copied to the host."""
        started, freed = time.perf_counter(), 0
        if self._swap.is_on_device(role.weights):
            trainer = self._trainers[role]
            trainer.reshard()
            freed = self._swap.to_host(role.weights, version=0).freed_bytes
            trainer.weights_on_device = False
            self._give_back_memory(freed)
        return ReshardStats(time.perf_counter() - started, swapped_bytes=freed)

    def account(self) -> None:
        """Enter present bytes into the ledger: optimizer state appears with the first update, a cache may grow."""
        if self._state == "generation":
            self._account_generator()
        if self._state == "update":
            for role in self._roles_of_training():
                for group in self._groups[role]:
                    self._swap.account(group)

    def close(self) -> None:
        """Wait for copies under way, and drop the host copies."""
        self._swap.close()

    def _roles_of_training(self) -> list[Role]:
        """Return the roles whose state is away exactly during generation."""
        return [role for role in self._trainers if role.presence == "training"]

    def _move_weights(self) -> tuple[Received, Left]:
        """Fill the generator while the update weights leave; returns the bytes received and those that left.

        A weight's memory in the generator is allocated when its first slice is due. A shard that equals the generator's
        slice is lent and stays.
        """
        storage, own = self._generator.wake_weights(()), self._policy.named_shards()
        shards = self._policy.shards_for(self._generator.weight_shapes())
        if self._plans_left:
            # After the first switch, without the weights that the generator keeps.
            kept = frozenset(self._kept)
            self._filling = GeneratorFilling(self._world, shards, self._generator, storage, self._config, kept=kept)
            self._plans_left -= 1
        assert self._filling is not None
        is_own = {name: shard.tensor.data_ptr() == own[name].tensor.data_ptr() for name, shard in shards.items()}
        lent = {name: tensor for name, tensor in self._filling.lent(shards, storage).items() if is_own[name]}
        if lent:
            self._generator.borrow_weights(lent)
            storage = self._generator.wake_weights(())
        self._account_generator()
        leaving = [
            self._swap.leave(group, version=0 if group == POLICY.base else self._policy.update_count, staying=lent)
            for group in self._groups[POLICY]
            if group != POLICY.optimizer
        ]
        self._policy.weights_on_device = False
        merged_bytes = sum(shard.tensor.nbytes for name, shard in shards.items() if not is_own[name])
        self._ledger.set("bucket", "device", self._filling.buffer_bytes + merged_bytes)
        watcher = Watcher(woken=lambda names: self._account_generator(), sent=self._releasing(leaving))
        received = self._filling.run(shards, storage, version=self._policy.update_count, watcher=watcher)
        faultpoint("reshard", *storage.values())
        left = _together([one.finish() for one in leaving])
        self._ledger.set("bucket", "device", 0)
        if self._plans_left:
            self._kept = [n for n in self._filling.targets if not self._policy.updates(n) and n not in lent]
            self._generator.keep_weights(self._kept)
        return received, left

    def _releasing(self, leaving: Sequence[Leaving]) -> Names:
        """Move weights out once sent.

        A CPU's freed memory is returned to the system in between, or it would be held beside the generator's.
        """
        held = self._ledger.bytes_of(POLICY.weights) + self._ledger.bytes_of("base_weights")

        def move(names: Iterable[str]) -> None:
            nonlocal held
            names = list(names)
            for one in leaving:
                one.move(names)
            left = self._ledger.bytes_of(POLICY.weights) + self._ledger.bytes_of("base_weights")
            if self._world.device.is_cpu and held - left >= LEAST_BYTES_TO_RELEASE:
                release_to_system()
                held = left

        return move

    def _account_generator(self) -> None:
        held = self._generator.memory_bytes()
        self._ledger.set("generation_weights", "device", held.get("generation_weights", 0))
        self._ledger.set("kv_cache", "device", held.get("kv_cache", 0))
        self._ledger.set("decode_graphs", "device", held.get("decode_graphs", 0))

    def _give_back_memory(self, freed_bytes: int) -> None:
        """Return freed bytes from this process's allocator before another one, such as the KV cache's, needs them."""
        if not self._world.device.is_cpu:
            self._world.device.empty_cache()
        elif freed_bytes >= LEAST_BYTES_TO_RELEASE:
            release_to_system()

    def _expect(self, state: State) -> None:
        if self._state != state:
            raise RuntimeError(
                f"the resharding flow is in state {self._state!r}, but this step needs {state!r}; "
                "the order is to_generation, start_return, to_update"
            )


def _together(left: Sequence[Left]) -> Left:
    return Left(sum(one.freed_bytes for one in left), sum(one.copied_bytes for one in left))


def groups_of(role: Role, trainer: TrainingEngine) -> dict[str, TensorsByName]:
    """Return the tensors of a role that the swap moves, by owner."""
    groups: dict[str, TensorsByName] = {role.weights: partial(_local_tensors, trainer)}
    if role.base is not None and not all(map(trainer.updates, trainer.named_shards())):
        groups[role.weights] = partial(_local_tensors, trainer, trainer.updates)
        groups[role.base] = partial(_local_tensors, trainer, lambda name: not trainer.updates(name))
    if role.optimizer is not None:
        groups[role.optimizer] = lambda: {str(number): one for number, one in enumerate(trainer.optimizer_tensors())}
    return groups


def _local_tensors(trainer: TrainingEngine, of: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    return {name: shard.tensor for name, shard in trainer.named_shards().items() if of(name)}
