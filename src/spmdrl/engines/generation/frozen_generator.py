"""A generation engine with constant weights, which are on the device only while it generates, else on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from spmdrl.engines.generation.protocol import GenerationEngine
from spmdrl.resources.device import Device
from spmdrl.resources.memory import MemoryLedger, Owner


class FrozenGenerator:
    """Engine of this rank alone, woken with the host's copy of its weights."""

    def __init__(
        self, engine: GenerationEngine, weights: Mapping[str, Tensor], device: Device, ledger: MemoryLedger,
        owner: Owner,
    ):  # fmt: skip
        """`weights` are the engine's by name, on the host in its dtypes; the ledger accounts for them under `owner`."""
        self._engine = engine
        self._weights = weights
        self._device = device
        self._ledger = ledger
        self._owner = owner
        ledger.set(owner, "host", sum(weight.nbytes for weight in weights.values()))

    @contextmanager
    def awake(self) -> Iterator[GenerationEngine]:
        """Wake the engine inside this block; the policy's must be asleep, since the ledger has one KV cache."""
        if self._device.is_cpu:
            self._engine.borrow_weights(self._weights)
        else:
            for name, own in self._engine.wake_weights().items():
                own.copy_(self._weights[name])
        self._engine.wake_cache()
        self._account()
        yield self._engine
        # Packing weights, and a CPU's growing cache, change its memory while it generates.
        self._account()
        self._engine.sleep()
        self._account()
        self._device.empty_cache()

    def _account(self) -> None:
        held = self._engine.memory_bytes()
        self._ledger.set(self._owner, "device", held["generation_weights"])
        self._ledger.set("kv_cache", "device", held["kv_cache"])
