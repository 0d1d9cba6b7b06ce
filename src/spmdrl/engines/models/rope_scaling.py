"""Scalings of rotary position embeddings to longer rows.

Shape letters: `K` head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """Gemma 3's scaling: all frequencies are divided by `factor`."""

    amplitude: ClassVar[float] = 1.0
    latent_softmax_factor: ClassVar[float] = 1.0

    factor: float
    """Divisor of the frequencies."""

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Divide frequencies [K / 2] by the factor, whatever their base."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: slow frequencies are divided by `factor`, fast ones kept, those between interpolated."""

    amplitude: ClassVar[float] = 1.0
    """Factor of queries and keys, applied with the rotation."""
    latent_softmax_factor: ClassVar[float] = 1.0
    """Factor of latent attention's softmax scale."""

    factor: float
    """Divisor of slow frequencies."""
    low_freq_factor: float
    """Frequencies that turn at most this often in `original_positions` are slow."""
    high_freq_factor: float
    """Frequencies that turn at least this often in `original_positions` are fast."""
    original_positions: int
    """Longest row before scaling."""

    def __post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be above 0 and below high_freq_factor "
                f"{self.high_freq_factor} in llama3 rope scaling"
            )
        _check_stretch(self.factor, self.original_positions)

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Divide slow frequencies [K / 2] by the factor, whatever their base."""
        turns = self.original_positions * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(frequencies, kept.clamp(0, 1), self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071, section 3.2), with DeepSeek's `mscale` (its attention temperature)."""

    factor: float
    """Divisor of slow frequencies."""
    original_positions: int
    """Longest row before scaling."""
    beta_fast: float = 32.0
    """Frequencies that turn at least this often in `original_positions` are kept."""
    beta_slow: float = 1.0
    """Frequencies that turn at most this often in `original_positions` are divided by the whole factor."""
    truncate: bool = True
    """True if the bounds between them are rounded outwards to whole dims."""
    attention_factor: float | None = None
    """Amplitude of the rotation; by default it follows from `factor` and the two below."""
    mscale: float | None = None
    """Growth of the amplitude with log(factor); only used with `mscale_all_dim`."""
    mscale_all_dim: float | None = None
    """Part of that growth which latent attention applies to all dims, through the softmax scale."""

    def __post_init__(self) -> None:
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_slow {self.beta_slow} must be above 0 and at most beta_fast {self.beta_fast} in yarn rope "
                "scaling"
            )
        _check_stretch(self.factor, self.original_positions)

    @property
    def amplitude(self) -> float:
        """Factor of queries and keys, applied with the rotation."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def latent_softmax_factor(self) -> float:
        """Factor of latent attention's softmax scale."""
        return self._temperature(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Divide slow frequencies [K / 2] of base `theta` by the factor."""
        num_frequencies = len(frequencies)
        low, high = (self._place_that_turns(beta, num_frequencies, theta) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num_frequencies - 1)
        places = torch.arange(num_frequencies, dtype=torch.float32, device=frequencies.device)
        kept = 1 - ((places - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return _blend(frequencies, kept, self.factor)

    def _place_that_turns(self, num_turns: float, num_frequencies: int, theta: float) -> float:
        """Return the frequency, counted from the fastest, that turns this often in `original_positions`."""
        return num_frequencies * math.log(self.original_positions / (num_turns * 2 * math.pi)) / math.log(theta)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class ProportionalScaling:
    """Rotation of a share of the pairs, the fastest, with the frequencies that they have among all (Gemma 4)."""

    amplitude: ClassVar[float] = 1.0
    latent_softmax_factor: ClassVar[float] = 1.0

    share: float
    """Rotated share of each head."""

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Stop all other frequencies [K / 2]."""
        places = torch.arange(len(frequencies), device=frequencies.device)
        return frequencies * (places < int(self.share * 2 * len(frequencies) // 2))


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling


def _blend(frequencies: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Interpolate between each frequency, by the share `kept`, and the frequency divided by the factor."""
    return frequencies * kept + frequencies / factor * (1 - kept)


def _check_stretch(factor: float, original_positions: int) -> None:
    if factor < 1 or original_positions < 1:
        raise ValueError(
            f"rope scaling has factor {factor} and original_max_position_embeddings {original_positions}, "
            "but both must be >= 1"
        )
