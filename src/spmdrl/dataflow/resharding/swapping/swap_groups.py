"""What the swap moves of each model, by its owner in the memory ledger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from spmdrl.dataflow.resharding.protocols import Trainer
from spmdrl.dataflow.resharding.swapping.swap import TensorsByName
from spmdrl.nouns.roles import Role


def groups_of(role: Role, trainer: Trainer) -> dict[str, TensorsByName]:
    """What the swap moves of a role, by owner."""
    groups: dict[str, TensorsByName] = {role.weights: partial(_local_tensors, trainer)}
    if role.base is not None and not all(map(trainer.updates, trainer.named_shards())):
        groups[role.weights] = partial(_local_tensors, trainer, trainer.updates)
        groups[role.base] = partial(_local_tensors, trainer, lambda name: not trainer.updates(name))
    if role.optimizer is not None:
        groups[role.optimizer] = partial(_optimizer_tensors, trainer)
    return groups


def _local_tensors(trainer: Trainer, of: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    return {name: shard.tensor for name, shard in trainer.named_shards().items() if of(name)}


def _optimizer_tensors(trainer: Trainer) -> dict[str, Tensor]:
    return {str(number): tensor for number, tensor in enumerate(trainer.optimizer_tensors())}
