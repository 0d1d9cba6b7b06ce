"""Cases, rows, weights and a loss to compare update layouts with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.nouns.batch import WeightSlice, offsets_of, whole_slice
from spmdrl.nouns.settings.training_config import OptimConfig
from spmdrl.resources.layout import UpdateLayout
from tests.bench.harness.bench_models import LAYOUT_MODELS

# AdamW divides a gradient by its own size, which makes whole steps of the rounding of those that should be 0. With an
# eps near the gradients' size a step is as precise as the gradient, and still not linear in it.
OPTIM = OptimConfig(lr=2e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
NUM_STEPS = 2
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
        return replace(LAYOUT_MODELS[self.model], num_layers=num_layers)

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
        if len(wanted.shape) > 1 and not wanted.name.endswith("bias"):
            gain = next((gain for module, gain in _GAINS.items() if module in wanted.name), 1.0)
            return self._weights.read(wanted) * gain
        whole = self._weights.read(whole_slice(wanted.name, self._weights.shape(wanted.name)))
        seed = int.from_bytes(hashlib.sha256(wanted.name.encode()).digest()[:4], "little")
        whole += 0.2 * torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed))
        return whole[wanted.index_within(whole_slice(wanted.name, whole.shape))]
