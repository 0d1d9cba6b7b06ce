"""Imports what ranks and jobs need and what takes long: they are forked from a process that has done no more."""

from __future__ import annotations

import gc

import hypothesis
import pytest
import safetensors.torch
import tensordict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.rpc
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import spmdrl.bench.layouts.layout_parity
import spmdrl.verbs.train

__all__ = [
    "AutoTokenizer",
    "PreTrainedTokenizerFast",
    "hypothesis",
    "pytest",
    "safetensors",
    "spmdrl",
    "tensordict",
    "torch",
]

# Collections in the forked processes then pass over these objects, which would otherwise copy their pages too.
gc.collect()
gc.freeze()
