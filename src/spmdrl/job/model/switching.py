"""The resharding flow for the loop: timed, counted, and with the memory ledger written at each switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import torch

from spmdrl.config.config import Config
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.resharding.flow import ReshardingFlow, ReshardStats
from spmdrl.dataflow.resharding.probe import Probe, default_tolerance, exempt_share, probe_rows
from spmdrl.dataflow.resharding.push import WeightPush
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.replica import Replica
from spmdrl.job.model.role_models import RoleModels
from spmdrl.job.model.swap_choice import announce, decide_residence
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.observability.terminal.units import bytes_text
from spmdrl.observability.timeline import Moved
from spmdrl.resources.device import Device
from spmdrl.resources.memory import MemoryLedger, peak_resident_bytes, resident_bytes
from spmdrl.resources.rank_sets import RankSets

PromptAt = Callable[[int], Prompt]
"""Prompt at a position of an endless sequence, the same on every rank."""


class Switching:
    """Switch of the models between update and generation. Its methods are collective over all ranks."""

    def __init__(
        self, flow: ReshardingFlow | WeightPush, ledger: MemoryLedger, logs: RunLogs, device: Device,
        probe: Probe | None = None,
    ):  # fmt: skip
        """Without a probe, as with `reshard.probe_tokens: 0`, only moved data is checked."""
        self._flow = flow
        self.ledger = ledger
        self._logs = logs
        self._device = device
        self._probe = probe
        self._planned_bytes: list[int] = []
        """planned bytes by switch"""

    @property
    def swaps(self) -> bool:
        """True if the training state is away while responses are generated."""
        return self._flow.swaps

    def to_generation(self, step: int) -> None:
        """Move the slices that generation lacks, free the update state, and probe the generator."""
        with self._probed(step), self._logs.timeline.stage("resharding", step):
            stats = self._flow.to_generation()
            self._note_planned(stats.planned_bytes)
            self._note_received(stats)
            # Copies to the host take the whole switch: the optimizer's first, then the weights' as they are sent.
            self._note_swapped(Moved("to_host", stats.copied_bytes, stats.seconds))
        self.note_memory(step, "to_generation")

    def start_return(self, step: int) -> None:
        """Put generation to sleep; the update state returns while the next stages run."""
        with self._logs.timeline.stage("resharding", step):
            self._flow.start_return()
        self.note_memory(step, "start_return")

    def to_update(self, step: int) -> None:
        """Wait until the update state is back."""
        with self._logs.timeline.stage("resharding", step):
            stats = self._flow.to_update()
        self._note_return(step, stats)
        self.note_memory(step, "to_update")

    @contextmanager
    def present(self, role: Role) -> Iterator[None]:
        """Keep the role's weights on the device inside this block, which is part of a stage."""
        if role.presence == "training":
            with self._flow.computing(role):
                yield
            return
        stats = self._flow.bring(role)
        # On exit they are only freed, since the host keeps its copy.
        self._note_swapped(Moved("from_host", stats.swapped_bytes, stats.seconds))
        try:
            yield
        finally:
            self._flow.release(role)

    def note_memory(self, step: int, stage: str) -> None:
        """Write the ledger at a boundary, and record the memory of the whole process."""
        self._flow.account()
        self._logs.timeline.memory(step, self.ledger.snapshot(stage))
        device, recorder = self._device, self._logs.recorder
        memory = device.memory_bytes()
        if memory is None:
            recorder.maximum("mem/resident_gib", resident_bytes() / 2**30)
            recorder.maximum("mem/peak_resident_gib", peak_resident_bytes() / 2**30)
        else:
            recorder.maximum(f"mem/{stage}_held_gib", device.held_bytes() / 2**30)
            recorder.maximum(f"mem/{stage}_peak_gib", device.take_peak_bytes() / 2**30)
            recorder.maximum("mem/total_gib", memory[1] / 2**30)

    @contextmanager
    def _probed(self, step: int) -> Iterator[None]:
        """Rate some rows by the trainer before this block, and by the generator, which the block fills, after it."""
        if self._probe is None:
            yield
            return
        with self._logs.timeline.stage("probe", step):
            rated = self._probe.rate(step)
        yield
        with self._logs.timeline.stage("probe", step):
            self._logs.recorder.maximum("mismatch/probe_abs_max", self._probe.check(rated))

    def _note_return(self, step: int, stats: ReshardStats) -> None:
        """Put the copy back to the device on the timeline, beside the stages that ran during it."""
        copied = stats.returned
        if copied is not None:
            moved = Moved("from_host", stats.swapped_bytes, copied.end - copied.start)
            self._logs.timeline.background("return", step, start=copied.start, end=copied.end, moved=[moved])
            self._logs.recorder.mean("reshard/return_hidden_share", stats.hidden_share, moved.seconds)
            self._count_swapped(moved)

    def _note_planned(self, planned_bytes: int) -> None:
        """Print, once, the bytes of every later switch beside those of the first."""
        self._planned_bytes.append(planned_bytes)
        if len(self._planned_bytes) == 2 and planned_bytes < self._planned_bytes[0]:
            first = self._planned_bytes[0]
            self._logs.console.note(
                f"adapters alone move from now on: {bytes_text(planned_bytes)} between all ranks at each switch, where "
                f"the first one moved {bytes_text(first)} with the model's own weights"
            )
            self._logs.add_to_summary("what moves", resharding={"first_bytes": first, "bytes": planned_bytes})

    def _note_received(self, stats: ReshardStats) -> None:
        """Put data from other ranks on the timeline and into the metrics; its links share the seconds."""
        received = Moved("node", stats.received_bytes - stats.cross_node_bytes, stats.move_seconds)
        crossed = Moved("cross_node", stats.cross_node_bytes, stats.move_seconds)
        for moved in (received, crossed):
            if moved.num_bytes:
                self._logs.timeline.note_moved(moved)
        recorder = self._logs.recorder
        recorder.total("reshard/bytes", stats.received_bytes)
        recorder.total("reshard/cross_node_bytes", stats.cross_node_bytes)
        recorder.maximum("reshard/seconds", stats.move_seconds)
        if stats.received_bytes:
            # Weighted by seconds, the mean over ranks is all their bytes in all their seconds.
            rate = received.gb_per_second + crossed.gb_per_second
            recorder.mean("reshard/gb_per_second", rate, stats.move_seconds)

    def _note_swapped(self, moved: Moved) -> None:
        if moved.num_bytes:
            self._logs.timeline.note_moved(moved)
            self._count_swapped(moved)

    def _count_swapped(self, moved: Moved) -> None:
        self._logs.recorder.total("reshard/swapped_bytes", moved.num_bytes)
        self._logs.recorder.mean(f"reshard/{moved.link}_gb_per_second", moved.gb_per_second, moved.seconds)


def build_switching(
    config: Config, logs: RunLogs, models: RoleModels, replica: Replica, source: ModelSource, stack: ExitStack, *,
    num_rows: int, prompt_at: PromptAt, sets: RankSets | None = None,
) -> Switching:  # fmt: skip
    """Return the switch of these models, closed with the stack, and probed with its step's prompts. Collective.

    `source` is the policy's. `num_rows` counts the rows that all replicas together generate at once.
    """
    ledger, device = MemoryLedger(), logs.world.device
    trainers = {role: model.trainer for role, model in models.items()}
    dtype = compute_dtype(config.model, device.kind)
    probe = _probe(config, trainers.get(POLICY), replica, source, prompt_at, dtype, sets)
    if sets is not None and sets.are_apart:
        push = WeightPush(logs.world, sets, trainers, replica.engine, config.reshard, ledger)
        return Switching(push, ledger, logs, device, probe)
    residence = decide_residence(config, logs.world, trainers, replica, num_rows=num_rows)
    # Of a CPU's swapped state, in files without a name.
    folder = Path(config.reshard.swap_dir).expanduser() if config.reshard.swap_dir else config.run.folder
    announce(residence, folder, logs)
    flow = ReshardingFlow(logs.world, trainers, replica.engine, config.reshard, ledger, folder, swaps=residence.swaps)
    stack.callback(flow.close)
    return Switching(flow, ledger, logs, device, probe)


def _probe(
    config: Config, trainer: TrainingEngine | None, replica: Replica, source: ModelSource, prompt_at: PromptAt,
    dtype: torch.dtype, sets: RankSets | None,
) -> Probe | None:  # fmt: skip
    """Return the comparison of both sides on a step's first prompts, or None with `reshard.probe_tokens: 0`."""
    num_tokens, tolerance = config.reshard.probe_tokens, config.reshard.probe_tolerance
    if num_tokens == 0:
        return None
    if tolerance is None:
        tolerance = default_tolerance(dtype)
    exempt = exempt_share(dtype, has_experts=source.decoder.moe is not None)
    # An engine that rates prompts beside generating needs a position for a token after them.
    longest = source.decoder.max_positions - 1

    def rows_of_step(step: int) -> list[list[int]]:
        positions = count(max(step - 1, 0) * config.rollout.prompts_per_step)
        return probe_rows((prompt_at(position).prompt_ids for position in positions), num_tokens, longest)

    return Probe(trainer, replica.engine, rows_of_step, tolerance=tolerance, exempt_share=exempt, sets=sets)
