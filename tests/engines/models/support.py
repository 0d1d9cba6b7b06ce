"""Tiny transformers models and our decoder with the same weights; a machine without a C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.engines.models.kernels.cpp.cpu_library import cpu_library
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.nouns.batch import offsets_of, whole_slice
from tests.support.chosen_device import chosen_device


def load_decoder(folder: Path) -> Decoder:
    decoder = Decoder(read_config(folder))
    files = open_weights(folder, decoder.config)
    with torch.no_grad():
        for name, weight in decoder.state_dict().items():
            weight.copy_(files.read(whole_slice(name, tuple(weight.shape))))
    return decoder.to(chosen_device())


def random_rows(lengths: list[int], vocab_size: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def packed_logits(decoder: Decoder, rows: list[Tensor]) -> list[Tensor]:
    """Logits [length, V] of each row, all rows in one packed forward; on the host, with their gradient."""
    lengths, device = [len(row) for row in rows], chosen_device()
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    attend = PackedCausalAttention(offsets_of(lengths))
    tokens_T = torch.cat(rows).to(device)
    logits_TV = decoder(tokens_T, positions_T, attend, lambda hidden_TD, head_VD: hidden_TD @ head_VD.T)
    if (cap := decoder.config.logit_softcap) is not None:
        logits_TV = cap * (logits_TV / cap).tanh()
    return list(logits_TV.cpu().split(lengths))


@contextmanager
def no_cpu_library() -> Iterator[None]:
    """Within the block no compiler is found, so that PyTorch's operations run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        patch.delenv("CXX", raising=False)
        cpu_library.cache_clear()
        try:
            assert cpu_library() is None
            yield
        finally:
            cpu_library.cache_clear()
