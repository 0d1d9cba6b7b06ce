"""Tiny models, rows and a loss to compare update layouts with: every part that a layout cuts is there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.making.make_model import RandomWeights
from spmdrl.engines.models.rope_scaling import Llama3Scaling, YarnScaling
from spmdrl.engines.training.batching.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.nouns.batch import WeightSlice, offsets_of, whole_slice
from spmdrl.nouns.settings.model_sizes import LatentConfig, MoeConfig
from spmdrl.nouns.settings.training_config import OptimConfig
from spmdrl.resources.layout import UpdateLayout
from tests.bench.harness.bench_models import qwen3

# Eight heads, experts and columns of each kind go into eight ranks; a vocabulary of 53 tokens divides by nothing, and
# four key heads are fewer than eight tensor ranks.
_DENSE = qwen3(
    vocab_size=53,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_size=8,
    attention_bias=True,
    max_positions=256,
    rope_scaling=Llama3Scaling(4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64),
)
_EXPERTS = MoeConfig(num_experts=8, experts_per_token=3, intermediate_size=16, normalize=True, dense_layers=(0,))
_LATENT = LatentConfig(query_rank=12, key_value_rank=10, plain_size=6, rotary_size=4, value_size=6)

MODELS: dict[str, DecoderConfig] = {
    "dense": _DENSE,
    "moe": replace(
        _DENSE, model_type="qwen3_moe", attention_bias=False, tied_head=False, rope_scaling=None, moe=_EXPERTS
    ),
    "mla": replace(
        _DENSE,
        model_type="deepseek_v3",
        num_kv_heads=8,
        head_size=_LATENT.head_size,
        qk_norm=False,
        attention_bias=False,
        tied_head=False,
        rope_scaling=YarnScaling(4.0, original_positions=64, mscale=1.0, mscale_all_dim=1.0),
        moe=replace(
            _EXPERTS, scoring="sigmoid", weight_scale=1.5, num_groups=4, groups_per_token=2, num_shared_experts=1
        ),
        latent=_LATENT,
    ),
}
"""By name; a case changes the number of layers."""

# AdamW divides a gradient by its own size, which makes whole steps of the rounding of those that should be 0. With an
# eps near the gradients' size a step is as precise as the gradient, and still not linear in it.
OPTIM = OptimConfig(lr=2e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
NUM_STEPS = 3
TOKENS_PER_MICROBATCH = 96


@dataclass(frozen=True)
class LayoutCase:
    """One model under one layout, which is fitted."""

    model: str
    layout: UpdateLayout

    @property
    def config(self) -> DecoderConfig:
        """The model with a layer more than the layout has stages, so that they differ, and three layers at least."""
        num_layers = max(3, self.layout.pipeline * self.layout.pipeline_chunks + 1)
        return replace(MODELS[self.model], num_layers=num_layers)

    def reference_path(self, folder: Path) -> Path:
        """The file with what one process makes of the same model."""
        return folder / f"{self.model}-{self.config.num_layers}.safetensors"

    @property
    def degrees(self) -> tuple[int, ...]:
        """What the layout's mesh depends on."""
        layout = self.layout
        return layout.data, layout.shard, layout.pipeline, layout.context, layout.tensor, layout.expert


def make_rows(vocab_size: int) -> TokenRows:
    """Fourteen rows of 2 to 60 tokens, the same on every machine; a response token weighs 1 / their number."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.tensor([2, 60, 3, 17, 31, 2, 9, 5, 23, 12, 37, 4, 8, 15])
    prompts_B = (lengths_B * torch.rand(len(lengths_B), generator=generator)).long().clamp(min=1)
    num_response = int((lengths_B - prompts_B).sum())
    return TokenRows(
        tokens_T=torch.randint(vocab_size, (int(lengths_B.sum()),), generator=generator),
        offsets=offsets_of(lengths_B),
        prompt_lengths_B=prompts_B,
        response={"weights": torch.full((num_response,), 1 / num_response)},
    )


def token_mean_loss(scores: Scores, micro: MicroBatch) -> LossTerms:
    """Negative log-likelihood with a little entropy, so that both gradients count."""
    loss = -(micro.response["weights"] * (scores.logprobs_R + 0.1 * scores.entropy_R)).sum()
    return LossTerms(loss, {"entropy": (scores.entropy_R.sum(), torch.tensor(scores.entropy_R.numel()))})


# Deep layers then add to a residual stream that is larger than what each of them adds, as in trained models. Without
# that, the rounding of 17 layers grows to 1e-5 of a gradient by packing rows differently in one process.
_GAINS = {"embed_tokens": 50.0, "lm_head": 20.0, "o_proj": 0.5, "down_proj": 0.5}


class UnevenWeights:
    """Random weights without constants: norms, biases and router corrections vary too."""

    def __init__(self, config: DecoderConfig, seed: int = 0):
        self._weights = RandomWeights(config, seed)

    def read(self, wanted: WeightSlice) -> Tensor:
        """One slice, of weights that depend on their names alone."""
        if len(wanted.shape) > 1:
            gain = next((gain for module, gain in _GAINS.items() if module in wanted.name), 1.0)
            return self._weights.read(wanted) * gain
        whole = self._weights.read(whole_slice(wanted.name, self._weights.shape(wanted.name)))
        seed = int.from_bytes(hashlib.sha256(wanted.name.encode()).digest()[:4], "little")
        whole += 0.2 * torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed))
        return whole[wanted.starts[0] : wanted.stops[0]]
