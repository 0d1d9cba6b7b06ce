"""Models whose outputs repeat phrases, as those of answers that copy or edit their prompt do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.bench.harness.bench_models import write_config
from spmdrl.bench.rollout.rollout_work import following
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.making.make_model import RandomWeights

_LAYERS_SHARE = 0.1
"""How large what the layers write is beside what random weights write."""


def write_repeating_model(folder: Path, config: DecoderConfig, chance: float) -> None:
    """Make a folder with a model by which a token is followed by the next of its phrase with about this chance.

    The layers are random, but write little, so that the last hidden state is mostly the token's own embedding. The head
    finds the phrase's next token by it: its logit is c sqrt(D), and those of the V others are normal with deviation c,
    where `c sqrt(D) = log V + c^2 / 2 + log(chance / (1 - chance))`.
    """
    config = replace(config, tied_head=False)
    write_config(folder, config)
    random = RandomWeights(config, seed=0)
    weights = {name: random(name) for name in random.names}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= _LAYERS_SHARE
    embeddings_VD = weights["model.embed_tokens.weight"]
    embeddings_VD /= embeddings_VD.square().mean(-1, keepdim=True).sqrt()
    weights["lm_head.weight"] = _head(embeddings_VD, chance)
    write_weights(folder, weights.items())


def _head(embeddings_VD: Tensor, chance: float) -> Tensor:
    vocab_size, root = embeddings_VD.shape[0], math.sqrt(embeddings_VD.shape[1])
    gap = math.log(vocab_size) + math.log(chance / (1 - chance))
    scale = root - math.sqrt(root**2 - 2 * gap)
    head_VD = torch.empty_like(embeddings_VD)
    head_VD[[following(token, vocab_size) for token in range(vocab_size)]] = scale / root * embeddings_VD
    return head_VD
