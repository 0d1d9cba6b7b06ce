"""A small made-up sample flow that tests run on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable

import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import needs_by_state
from spmdrl.nouns.batch import Batch, WorkerState, offsets_of
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.device import find_device
from spmdrl.resources.world import World
from spmdrl.runtime.launch import LaunchEnvironment
from tests.support.chosen_device import chosen_device

NUM_ROWS, GROUP_SIZE = 24, 4
ONE_RANK = World(LaunchEnvironment(), find_device("cpu", 0))


def open_dock(world: World, config: DockConfig | None = None) -> TransferDock:
    return TransferDock(world, needs_by_state({"advantages", "rollout_logprobs"}), config or DockConfig(20.0))


def make_prompts() -> list[Prompt]:
    return [make_prompt([group] * (group % 3 + 1)) for group in range(NUM_ROWS // GROUP_SIZE)]


def make_prompt(ids: list[int]) -> Prompt:
    return Prompt("", ids, "", None, {}, "")


def response_of(row: int) -> list[int]:
    return [1000 * row + token for token in range(row * 7 % 11 + 1)]


def put_from_device(samples: Samples, state: WorkerState, batch: Batch) -> None:
    """Put a batch whose tensors lie on the tests' device."""
    samples.put(state, Batch.over(batch.data.to(chosen_device())))


def put_group(samples: Samples, group: list[int], response: Callable[[int], list[int]] = response_of) -> None:
    """Put the responses of these rows."""
    batch = Batch.of_rows(group)
    responses = [response(row) for row in group]
    batch.put_lists("response_ids", responses, torch.int32)
    batch.put_lists("rollout_logprobs", [[-0.5] * len(tokens) for tokens in responses], torch.float32)
    batch.put_lists("versions", [[3] * len(tokens) for tokens in responses], torch.int32)
    batch.put_dense("finished", torch.ones(len(group), dtype=torch.int32))
    put_from_device(samples, WorkerState.GENERATION, batch)


def generate(samples: Samples, rows: list[int], response: Callable[[int], list[int]] = response_of) -> None:
    """Put the responses group by group, as they would finish."""
    for start in range(0, len(rows), samples.group_size):
        put_group(samples, rows[start : start + samples.group_size], response)
    samples.commit(WorkerState.GENERATION)


def reward(samples: Samples) -> list[int]:
    rows = samples.rows.take_generated(WorkerState.REWARD)
    batch = Batch.of_rows(rows)
    batch.put_dense("reward", torch.tensor([float(row) for row in rows], dtype=torch.float32))
    batch.put_dense("reward_verdict", torch.zeros(len(rows), dtype=torch.int32))
    put_from_device(samples, WorkerState.REWARD, batch)
    samples.commit(WorkerState.REWARD)
    return rows


def credit(samples: Samples, dropped: tuple[int, ...] = ()) -> None:
    taken = samples.take(WorkerState.ADVANTAGE, {"reward", "response_ids"})
    lengths = taken.lengths("response_ids")
    batch = Batch(taken.rows)
    batch.put_ragged("advantages", taken.dense("reward").repeat_interleave(lengths), offsets_of(lengths))
    put_from_device(samples, WorkerState.ADVANTAGE, batch)
    samples.mark_dropped(dropped, "no reward")
    samples.commit(WorkerState.ADVANTAGE)


def check_training_rows(batch: Batch) -> None:
    """Each row brought its own prompt, response, log-probs and advantage."""
    for position, row in enumerate(batch.rows.tolist()):
        group = row // GROUP_SIZE
        assert batch.to_lists("prompt_ids")[position] == [group] * (group % 3 + 1)
        assert batch.to_lists("response_ids")[position] == response_of(row)
        assert batch.to_lists("rollout_logprobs")[position] == [-0.5] * len(response_of(row))
        assert batch.to_lists("advantages")[position] == [float(row)] * len(response_of(row))


def run_step(dock: TransferDock, step: int, dropped: tuple[int, ...] = ()) -> dict:
    """One whole step; what this rank did in it."""
    samples = dock.open_batch(step, make_prompts(), GROUP_SIZE)
    generated = samples.rows.deal_generation()
    generate(samples, generated)
    rewarded = reward(samples)
    credit(samples, dropped)
    names = {"prompt_ids", "response_ids", "rollout_logprobs", "advantages"}
    batch = samples.take(WorkerState.UPDATE, names)
    check_training_rows(batch)
    samples.commit(WorkerState.UPDATE)
    accounting = dock.close_batch(samples)
    return {
        "generated": generated,
        "rewarded": rewarded,
        "trained": batch.rows.tolist(),
        "num_trained": accounting.num_trained,
        "num_dropped": dict(accounting.num_dropped),
    }
