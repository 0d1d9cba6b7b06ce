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
"""decoding steps from which compiling pays on a CPU: it takes up to a minute, and a step that is bound by small
operations gets about half a millisecond faster"""
# Of wider models, or more rows of the second, steps are bound by products, which no graph makes faster.
_SMALL_WIDTH = 128
_FEW_ROWS, _WIDTH_OF_FEW_ROWS = 16, 256


def decide_compile(checked: CheckedRun, decoder: DecoderConfig, world: World) -> bool:
    """Whether the native engine compiles: as the config says, else where that pays. Collective over the world.

    What it says follows from the config and the machines alone, so that a run that is resumed rounds as before.
    """
    config = checked.config
    if config.rollout.compile is not None:
        return config.rollout.compile
    may = checked.verb == "train" and world.device.is_cpu and not config.debug.batch_invariant
    if not (may and _is_bound_by_small_operations(config, decoder, world.size)):
        return False
    if expected_decoding_steps(config, world.size) < LEAST_STEPS:
        return False
    return not int(max_over(torch.tensor([not _can_compile(config, world)]).int())[0])


def expected_decoding_steps(config: Config, num_ranks: int) -> int:
    """Decoding steps of a rank in the whole run, if responses become half as long as they may."""
    batches = -(-_rows_each(config, num_ranks) // config.rollout.max_running_rows)
    return config.train.max_steps * batches * config.rollout.max_completion_length // 2


def _is_bound_by_small_operations(config: Config, decoder: DecoderConfig, num_ranks: int) -> bool:
    """Rather than by products, or by experts, which run outside the graph."""
    has_few_rows = min(_rows_each(config, num_ranks), config.rollout.max_running_rows) <= _FEW_ROWS
    width = _WIDTH_OF_FEW_ROWS if has_few_rows else _SMALL_WIDTH
    return decoder.moe is None and decoder.hidden_size <= width


def _rows_each(config: Config, num_ranks: int) -> int:
    """Rows that a replica generates in a step."""
    rollout, num_replicas = config.rollout, num_ranks // config.resources.generation.tensor
    return -(-(rollout.prompts_per_step + rollout.extra_prompts) // num_replicas) * rollout.num_generations


def _can_compile(config: Config, world: World) -> bool:
    try:
        check_compiles(config.resources.generation)
        check_compiler(world.device.torch_device)
    except ValueError:
        return False
    return True
