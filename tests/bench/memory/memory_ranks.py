"""A rank of the memory bench: one step with the swap of the training state or without it, watched while it runs."""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.roles import POLICY
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.memory import MemoryLedger, release_to_system, resident_bytes
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.bench.harness.bench_models import qwen3

_SECONDS_BETWEEN_LOOKS = 0.01
# Numbers of glibc's header malloc.h.
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 18


def give_freed_blocks_back() -> None:
    """Let glibc return each large block that is freed, as residence wouldn't show what is in use otherwise.

    It would keep those of up to 32 MiB in its heap.
    """
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) == 1


@dataclass(frozen=True)
class WatchedStep:
    """What both runs do."""

    num_layers: int
    num_rows: int
    """responses that a rank generates, and rows of its update"""
    length: int
    """tokens of a prompt, and of its response"""
    swap: bool
    kv_cache_gib: float | None = None
    """of the generator; by what the rows need unless given"""

    @property
    def model(self) -> DecoderConfig:
        """A Qwen3 of 6.3M parameters, and 6.9M a layer."""
        return qwen3(
            vocab_size=8192,
            hidden_size=768,
            intermediate_size=2304,
            num_layers=self.num_layers,
            num_heads=12,
            num_kv_heads=4,
            head_size=64,
            max_positions=2 * self.length,
        )


@dataclass(frozen=True)
class Look:
    """What one rank held at one moment: resident bytes beyond those of an idle rank, and its ledger of the device."""

    seconds: float
    resident: int
    ledger: dict[str, int]


class Watch:
    """Samples this rank's memory from a thread of its own, phase by phase."""

    def __init__(self, ledger: MemoryLedger, idle_bytes: int):
        self.phases: dict[str, list[Look]] = {}
        self._ledger = ledger
        self._idle_bytes = idle_bytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Sample from the start of the block to its end."""
        looks, ended, started = self.phases.setdefault(name, []), threading.Event(), time.perf_counter()

        def look() -> None:
            device = dict(self._ledger.snapshot(name).device)
            looks.append(Look(time.perf_counter() - started, resident_bytes() - self._idle_bytes, device))

        def look_repeatedly() -> None:
            while not ended.wait(_SECONDS_BETWEEN_LOOKS):
                look()

        look()
        thread = threading.Thread(target=look_repeatedly)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        look()


class StepOfOneRank:
    """The parts of one step on one rank. Its methods are collective."""

    def __init__(self, world: World, settings: WatchedStep, folder: Path):
        model = settings.model
        mesh = build_update_mesh(UpdateLayout(shard=world.size), world.device, world.rank)
        self._settings = settings
        self._trainer = TrainingEngine(model, TrainingConfig(), OptimConfig(lr=1e-4), mesh, world.device)
        self._trainer.load(RandomWeights(model, 0))
        rollout = RolloutConfig(kv_cache_gib=settings.kv_cache_gib)
        device = world.device
        self._generator = NativeEngine(model, rollout, device.torch_device, device.compute_dtype)
        self.ledger = MemoryLedger()
        self.flow = ReshardingFlow(
            world,
            {POLICY: self._trainer},
            self._generator,
            ReshardConfig(),
            self.ledger,
            folder,
            swaps=settings.swap,
        )

    def update(self) -> None:
        num_rows, length = self._settings.num_rows, 2 * self._settings.length
        tokens_T = torch.arange(num_rows * length) % self._settings.model.vocab_size
        rows = TokenRows(tokens_T, offsets_of([length] * num_rows), torch.full((num_rows,), self._settings.length))
        self._trainer.update(rows, _likelihood)
        self._trainer.drop_gradients()
        release_to_system()
        self.flow.account()

    def generate(self) -> None:
        length, numbers = self._settings.length, range(self._settings.num_rows)
        sampling = SamplingParams(max_tokens=length)
        prompts = [tuple(range(number, number + length)) for number in numbers]
        self._generator.submit([Request((number,), prompts[number], (number,), sampling) for number in numbers])
        self.flow.account()
        while self._generator.num_unfinished:
            self._generator.step()

    def come_back(self) -> None:
        self.flow.start_return()
        self.flow.to_update()


def _likelihood(scores: Scores, micro: MicroBatch) -> LossTerms:
    return LossTerms(-scores.logprobs_R.mean(), {})


def watch_step(world: World, settings: WatchedStep) -> dict[str, list[Look]]:
    """What this rank held in each phase of a step, after a first one that is not counted. Collective."""
    give_freed_blocks_back()
    idle = resident_bytes()
    with tempfile.TemporaryDirectory() as folder:
        step = StepOfOneRank(world, settings, Path(folder))
        watch = Watch(step.ledger, idle)
        phases = {
            "update": step.update,
            "switch": step.flow.to_generation,
            "generation": step.generate,
            "return": step.come_back,
            "next update": step.update,
        }
        for work in phases.values():
            work()
        for name, work in phases.items():
            with watch.phase(name):
                work()
    return watch.phases
