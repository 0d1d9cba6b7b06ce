"""Imports what ranks and jobs need and what takes long: they are forked from a process that has done no more."""

from __future__ import annotations

import gc

import hypothesis
import numpy.ctypeslib
import numpy.ma
import pytest
import safetensors.torch
import tensordict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.rpc
import transformers.models.qwen3.configuration_qwen3
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import spmdrl.engines.generation.native.native_engine
import spmdrl.verbs.check
import spmdrl.verbs.evaluate
import spmdrl.verbs.train
from spmdrl.config.config import load_config
from spmdrl.config.reader import resolved_yaml
from spmdrl.observability.report.page import Header, page_html

__all__ = [
    "AutoTokenizer",
    "PreTrainedTokenizerFast",
    "hypothesis",
    "numpy",
    "pytest",
    "safetensors",
    "spmdrl",
    "tensordict",
    "torch",
    "transformers",
]

# What reads and checks a config is made from its classes once per process, in half of a small job's seconds; usual
# values are formatted once.
resolved_yaml(load_config([], ["data.train=any", "model.path=any"]))
# Templates of reports are compiled once per process too.
page_html(Header("", "", "", {}), [])

# Collections in the forked processes then pass over these objects, which would otherwise copy their pages too.
gc.collect()
gc.freeze()
