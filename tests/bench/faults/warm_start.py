"""Imported by the process from which ranks are forked: what reads a config is made of its classes once, not per job."""

from __future__ import annotations

import gc

import transformers.models.qwen3.configuration_qwen3  # noqa: F401
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spmdrl.config.config import load_config

__all__ = ["AutoTokenizer", "PreTrainedTokenizerFast"]

load_config([], ["data.train=any", "model.path=any"])

# Collections in the forked processes then pass over these objects, which would otherwise copy their pages too.
gc.collect()
gc.freeze()
