"""The probe's tolerance against real distances: two layouts that round differently pass, weights in wrong places don't.

Both sides are training engines, one with whole matrices and one with matrices cut in two.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmdrl.dataflow.resharding.probe import Probe, Rated, default_tolerance, exempt_share
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WeightSlice, offsets_of
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.support.ranks import run_ranks

DENSE = DecoderConfig(
    model_type="qwen3",
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    rms_eps=1e-6,
    rope_theta=1e4,
    qk_norm=True,
    attention_bias=False,
    tied_head=False,
    max_positions=64,
)
SPARSE = replace(
    DENSE,
    model_type="qwen3_moe",
    moe=MoeConfig(num_experts=16, experts_per_token=4, intermediate_size=128, normalize=True),
)
NUM_PROBES, TOKENS = 32, 33
# Of the logits, as of a trained model that is sure of itself: unlikely tokens, of which the probe meets many here, get
# log-probs down to -30, which bfloat16 resolves to eighths.
STANDARD_DEVIATION = 4.0


class SharpWeights:
    """Random weights with large logits, of which one may have its rows in wrong places."""

    def __init__(self, config: DecoderConfig, misplaced: str | None = None):
        self._random = RandomWeights(config, seed=1)
        # Heads deviate by 0.02, and meet normalized states.
        self._factor = STANDARD_DEVIATION / (0.02 * math.sqrt(config.hidden_size))
        self._misplaced = misplaced

    def read(self, wanted: WeightSlice) -> Tensor:
        values = self._random.read(wanted)
        if wanted.name == "lm_head.weight":
            values = values * self._factor
        return values.roll(1, 0) if wanted.name == self._misplaced else values


def logprobs(world: World, config: DecoderConfig, layout: UpdateLayout, misplaced: str | None = None) -> Tensor:
    """What an engine in bfloat16 gives random tokens, [probes, tokens - 1]. Collective."""
    mesh = build_update_mesh(layout, world.device, world.rank)
    engine = TrainingEngine(
        config, TrainingConfig(), OptimConfig(), mesh, world.device, frozen=True, compute_dtype=torch.bfloat16
    )
    engine.load(SharpWeights(config, misplaced))
    tokens = torch.randint(config.vocab_size, (NUM_PROBES, TOKENS), generator=torch.Generator().manual_seed(3))
    rows = TokenRows(tokens.flatten(), offsets_of([TOKENS] * NUM_PROBES), torch.ones(NUM_PROBES, dtype=torch.int64))
    return engine.score(rows).logprobs_R.cpu().view(NUM_PROBES, -1)


def distances(world: World, config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Of cut matrices to whole ones, and of an embedding whose rows are one place off to the right one."""
    whole, cut = UpdateLayout(data=2, shard=1), UpdateLayout(shard=1, tensor=2)
    right = logprobs(world, config, whole)
    wrong = logprobs(world, config, whole, misplaced="model.embed_tokens.weight")
    return logprobs(world, config, cut) - right, wrong - right


def is_accepted(distance_R: Tensor, config: DecoderConfig) -> bool:
    exempt = exempt_share(torch.bfloat16, has_experts=config.moe is not None)
    tolerance = default_tolerance(torch.bfloat16)
    probe = Probe(_Unused(), _Given(distance_R), lambda step: [], tolerance=tolerance, exempt_share=exempt)
    try:
        probe.check(Rated([], torch.zeros_like(distance_R)))
    except RuntimeError:
        return False
    return True


class _Unused:
    def score(self, rows, *, temperature=None):
        raise AssertionError("the distances are given")


class _Given:
    version = 0

    def __init__(self, logprobs_R: Tensor):
        self._logprobs_R = logprobs_R

    def score(self, rows):
        return [self._logprobs_R]


@pytest.mark.ranks
@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_rounding_is_accepted_and_weights_in_wrong_places_are_refused(config):
    rounded, wrong = run_ranks(2, distances, config)[0]
    largest = rounded.abs().amax(1)
    print(f"{config.model_type}: the largest of {TOKENS - 1} distances is {largest.median():.2f} nats in the median of")
    print(f"{NUM_PROBES} probes and {largest.max():.2f} at most; {wrong.abs().amax(1).min():.2f} at least if misplaced")
    assert all(is_accepted(distance_R, config) for distance_R in rounded)
    assert not any(is_accepted(distance_R, config) for distance_R in wrong)
    # What models with experts are exempt for: held to the largest distance, a sound run would end.
    assert bool((largest > default_tolerance(torch.bfloat16)).any()) == (config.moe is not None)
