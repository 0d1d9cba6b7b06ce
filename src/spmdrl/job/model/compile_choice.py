"""Whether a run compiles its decoding steps where the config leaves that open, decided once by all ranks together."""

from __future__ import annotations

import torch

from spmdrl.config.config import Config
from spmdrl.engines.generation.native.compiled import check_compiler, check_compiles
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.job.start.start_checks import CheckedRun
from spmdrl.resources.collectives import max_over
from spmdrl.resources.world import World

LEAST_STEPS = 100_000
"""decoding steps from which compiling pays on a CPU: it takes about a minute, and a step of a small model gets 0.2 to 3
milliseconds faster"""


def decide_compile(checked: CheckedRun, decoder: DecoderConfig, world: World) -> bool:
    """Whether the native engine compiles: as the config says, else where that pays. Collective over the world.

    What it says follows from the config and the machines alone, so that a run that is resumed rounds as before.
    """
    config = checked.config
    if config.rollout.compile is not None:
        return config.rollout.compile
    # A sparse model's steps are bound by its experts, which no graph makes faster.
    may = checked.verb == "train" and world.device.is_cpu and decoder.moe is None and not config.debug.batch_invariant
    if not may or expected_decoding_steps(config, world.size) < LEAST_STEPS:
        return False
    return not int(max_over(torch.tensor([not _can_compile(config, world)]).int())[0])


def expected_decoding_steps(config: Config, num_ranks: int) -> int:
    """Decoding steps of a rank in the whole run, if responses become half as long as they may."""
    rollout = config.rollout
    num_replicas = num_ranks // config.resources.generation.tensor
    groups_each = -(-(rollout.prompts_per_step + rollout.extra_prompts) // num_replicas)
    batches = -(-groups_each * rollout.num_generations // rollout.max_running_rows)
    return config.train.max_steps * batches * rollout.max_completion_length // 2


def _can_compile(config: Config, world: World) -> bool:
    try:
        check_compiles(config.resources.generation)
        check_compiler(world.device.torch_device)
    except ValueError:
        return False
    return True
