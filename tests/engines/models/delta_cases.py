"""Inputs of the gated delta rule and its convolution, and the kernels that compute it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels.cpp.cpu_library import cpu_library

# Key heads, value heads, their sizes, and the convolution's width: sizes that fill whole vectors, and others.
SIZES = [
    (1, 1, 16, 16, 4),
    (2, 4, 16, 24, 4),
    (4, 4, 32, 32, 4),
    (1, 3, 5, 7, 3),
    (2, 8, 8, 4, 2),
    (3, 6, 24, 40, 4),
    (2, 2, 33, 70, 5),
    (1, 2, 128, 128, 4),
    (2, 2, 64, 80, 1),
]


def a_few_sizes(others: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Value heads that share key heads, and sizes that fill no vector; `others` marks the remaining ones."""
    sizes = [one if number in (1, 3) else pytest.param(one, marks=others) for number, one in enumerate(SIZES)]
    return pytest.mark.parametrize("sizes", sizes)


def need_library() -> None:
    if cpu_library() is None:
        pytest.skip("this machine has no C++ compiler")


def rule_inputs(
    num_tokens: int, num_rows: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Queries, keys, values, log decays from none to all, betas, and states before rows."""
    G, H, K, U, _ = sizes
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, G, K), (num_tokens, G, K), (num_tokens, H, U), (num_tokens, H), (num_tokens, H)]
    q, k, v, decay, beta, before = (
        torch.randn(shape, generator=generator, dtype=dtype) for shape in (*shapes, (num_rows, H, K, U))
    )
    return [q, k, v, -F.softplus(3 * decay), beta.sigmoid(), before]


def conv_inputs(
    num_tokens: int, num_rows: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Values, weight, and columns before rows."""
    channels, width = sizes[0] * sizes[2] + 3, sizes[-1]
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, channels), (channels, width), (num_rows, width - 1, channels)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float = 2e-6) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        scale = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * max(scale, 1e-3))
