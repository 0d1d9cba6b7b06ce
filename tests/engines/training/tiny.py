"""Tiny models, rows for them, weights and a loss, alike in every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.engines.parallel.weight_cuts import Parts
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WeightSlice, offsets_of, whole_slice
from spmdrl.nouns.settings.model_sizes import IndexerSizes, LatentConfig, MoeConfig
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import Axis, build_update_mesh
from spmdrl.resources.world import World
from tests.support.chosen_device import chosen_device

# 17 and 13 divide by nothing, and 4 rows of a head norm over 3 ranks leave the last one empty.
CONFIG = DecoderConfig(
    model_type="qwen3",
    vocab_size=17,
    hidden_size=8,
    intermediate_size=13,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=4,
    rms_eps=1e-6,
    rope_theta=10000.0,
    qk_norm=True,
    attention_bias=False,
    tied_head=False,
    max_positions=64,
)
# The same with latent attention, and a feed-forward that can be cut.
LATENT = replace(
    CONFIG,
    intermediate_size=12,
    num_kv_heads=4,
    head_size=6,
    qk_norm=False,
    latent=LatentConfig(query_rank=5, key_value_rank=3, plain_size=4, rotary_size=2, value_size=3),
)
_INDEXER = IndexerSizes(num_heads=2, head_size=4, num_chosen=64, shared_layers=(1,), max_positions=64)
# The same with an indexer in the first layer.
INDEXED = replace(LATENT, latent=replace(LATENT.latent, indexer=_INDEXER))
# A dense layer, then one with experts.
SPARSE = replace(
    CONFIG,
    model_type="qwen3_moe",
    vocab_size=11,
    intermediate_size=8,
    num_heads=2,
    tied_head=True,
    moe=MoeConfig(num_experts=8, experts_per_token=3, intermediate_size=4, normalize=True, dense_layers=(0,)),
)
TEMPERATURE = 0.8
# A large eps keeps Adam from turning the rounding of near-zero gradients into whole steps.
OPTIM = OptimConfig(lr=1e-2, eps=1e-4, max_grad_norm=0.5, warmup_steps=2)


class SeededWeights:
    """A weight source with the same values for any layout."""

    def __init__(self, seed: int = 0):
        with torch.device("meta"):
            shapes = {name: parameter.shape for name, parameter in Decoder(CONFIG).named_parameters()}
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
            for name, shape in shapes.items()
        }

    def read(self, wanted: WeightSlice) -> Tensor:
        return part_of(self.tensors[wanted.name], wanted)


def part_of(whole: Tensor, box: WeightSlice) -> Tensor:
    """The view of a whole tensor that is a slice of it."""
    return whole[box.index_within(whole_slice(box.name, tuple(whole.shape)))]


def fill(decoder: Decoder, parts: Parts) -> Decoder:
    """Give a decoder its slices of weights that depend on nothing but their names' order."""
    decoder.to_empty(device=chosen_device())
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in sorted(parts.shapes.items())}
    with torch.no_grad():
        for name, held in decoder.state_dict().items():
            held.copy_(part_of(whole[name], parts.slices[name]))
    return decoder


def axis_of(name: str, size: int = 1, rank: int = 0) -> Axis:
    """An axis on paper, over which nothing can be sent."""
    return Axis(name, size, rank, None, tuple(range(size)))


def packed(lengths: Sequence[int]) -> tuple[Tensor, PackedCausalAttention]:
    """Positions [T] of rows of these lengths, one after the other, and causal attention within each."""
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    return positions_T.to(chosen_device()), PackedCausalAttention(offsets_of(lengths))


def make_engine(
    world: World,
    *,
    layout: UpdateLayout | None = None,
    max_tokens: int | None = None,
    optim: OptimConfig = OPTIM,
    compute_dtype: torch.dtype = torch.float32,
) -> TrainingEngine:
    fitted = fit_update_layout(layout or UpdateLayout(), world.size)
    mesh = build_update_mesh(fitted, world.device, world.rank)
    training = TrainingConfig(max_tokens_per_microbatch=max_tokens)
    engine = TrainingEngine(
        CONFIG, training, optim, mesh, world.device, temperature=TEMPERATURE, compute_dtype=compute_dtype
    )
    engine.load(SeededWeights())
    return engine


def make_rows(num_rows: int = 7, seed: int = 0) -> TokenRows:
    """Rows of 3 to 12 tokens, with weights that add up to 1 and a row number per token."""
    generator = torch.Generator().manual_seed(seed)
    prompts_B = torch.randint(1, 5, (num_rows,), generator=generator)
    lengths_B = prompts_B + torch.randint(2, 8, (num_rows,), generator=generator)
    num_response = int(lengths_B.sum() - prompts_B.sum())
    return TokenRows(
        tokens_T=torch.randint(0, CONFIG.vocab_size, (int(lengths_B.sum()),), generator=generator),
        offsets=offsets_of(lengths_B),
        prompt_lengths_B=prompts_B,
        response={
            "weights": torch.rand(num_response, generator=generator) / num_response,
            "row": torch.arange(num_rows).repeat_interleave(lengths_B - prompts_B),
        },
    )


def weighted_nll(scores: Scores, micro: MicroBatch) -> LossTerms:
    """Weighted negative log-likelihood with an entropy bonus."""
    weights_R = micro.response["weights"]
    loss = -(weights_R * (scores.logprobs_R + 0.1 * scores.entropy_R)).sum()
    count = torch.tensor(scores.entropy_R.numel())
    return LossTerms(loss, {"entropy": (scores.entropy_R.sum(), count)})


def relative_difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm().clamp(min=1e-12))


def whole_weights(engine: TrainingEngine) -> dict[str, Tensor]:
    """Copies of the weights on the host, gathered where they are sharded. Collective."""
    return {name: weight.to("cpu", copy=True) for name, weight in engine.whole_weights(torch.float32)}
