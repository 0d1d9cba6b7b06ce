"""Decoders of families beyond the sizes that `model.make` has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import decoder_config
from spmdrl.nouns.settings.model_config import MakeConfig


def latent_decoder(*, value_size: int, query_rank: int, **sizes: Any) -> DecoderConfig:
    """A deepseek_v3 whose values and queries have other sizes than its keys."""
    made = decoder_config(MakeConfig(model_type="deepseek_v3", **sizes))
    assert made.latent is not None
    return replace(made, latent=replace(made.latent, value_size=value_size, query_rank=query_rank))
