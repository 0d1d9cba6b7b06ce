"""A generation engine whose weights never change: they lie on the host, and on the device only while it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from spmdrl.engines.generation.protocol import GenerationEngine
from spmdrl.resources.device import Device
from spmdrl.resources.memory import MemoryLedger, Owner


class FrozenGenerator:
    """Wakes an engine of this rank alone with the host's copy of its weights."""

    def __init__(
        self, engine: GenerationEngine, weights: Mapping[str, Tensor], device: Device, ledger: MemoryLedger,
        owner: Owner,
    ):  # fmt: skip
        """`weights` are those of the engine by name, on the host in its dtypes; the ledger has them under `owner`."""
        self._engine = engine
        self._weights = weights
        self._device = device
        self._ledger = ledger
        self._owner = owner
        ledger.set(owner, "host", sum(weight.nbytes for weight in weights.values()))

    @contextmanager
    def awake(self) -> Iterator[GenerationEngine]:
        """The engine, awake inside this block; the policy's must be asleep, since the ledger has one KV cache."""
        if self._device.is_cpu:
            self._engine.borrow_weights(self._weights)
        else:
            for name, own in self._engine.wake_weights().items():
                own.copy_(self._weights[name])
        self._engine.wake_cache()
        self._account()
        yield self._engine
        # Weights are packed, and a CPU's cache grows, as rows are answered.
        self._account()
        self._engine.sleep()
        self._account()
        self._device.empty_cache()

    def _account(self) -> None:
        held = self._engine.memory_bytes()
        self._ledger.set(self._owner, "device", held["generation_weights"])
        self._ledger.set("kv_cache", "device", held["kv_cache"])
