"""Sampling of each row's next token from logits, by the row's own parameters and random numbers.

The draw is a pure function of (seed, position, logits): a counter-based uniform and the inverse of the filtered
distribution. So a row gets the same tokens whatever runs beside it, on any number of ranks, after any restart.

Shape letters: `B` rows, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.generation.native.running_rows import Row
from spmdrl.engines.generation.protocol import Decode, Finish, completes_stop_string
from spmdrl.engines.models.kernels import ops, plain
from spmdrl.nouns.settings.rollout_config import SamplingParams

# Constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as signed
# 64-bit integers; products wrap around.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_SECOND = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class SamplingKinds:
    """Parts of `draw` that any row of a batch needs."""

    has_scaling: bool
    """True if any row's logits are divided by another number than 1."""
    has_filters: bool
    """True if any row drops tokens."""
    has_greedy: bool
    """True if any row takes the likeliest token."""
    has_draws: bool
    """True if any row draws its token."""


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of a batch, one entry per row."""

    kinds: SamplingKinds
    streams_B: Tensor
    """Mixed seeds of the rows; see `uniforms`."""
    divisor_B1: Tensor
    """Temperatures, with 1 for 0."""
    greedy_B: Tensor
    """True for temperature 0."""
    top_p_B: Tensor
    top_k_B: Tensor
    min_p_B: Tensor

    @classmethod
    def of_rows(cls, seeds: Sequence[int], sampling: Sequence[SamplingParams], device: torch.device) -> RowSampling:
        # Rows of one rollout have the same parameters, as a rule the same object.
        distinct = {id(params): params for params in sampling}.values()

        def column(name: str, dtype: torch.dtype) -> Tensor:
            if len(distinct) == 1:
                return torch.full((len(sampling),), getattr(sampling[0], name), dtype=dtype, device=device)
            return torch.tensor([getattr(params, name) for params in sampling], dtype=dtype, device=device)

        temperature_B = column("temperature", torch.float32)
        greedy_B = temperature_B == 0
        return cls(
            streams_B=splitmix64(torch.tensor(seeds, dtype=torch.int64, device=device)),
            divisor_B1=temperature_B.masked_fill(greedy_B, 1)[:, None],
            greedy_B=greedy_B,
            top_p_B=column("top_p", torch.float32),
            top_k_B=column("top_k", torch.int64),
            min_p_B=column("min_p", torch.float32),
            kinds=SamplingKinds(
                has_scaling=any(params.temperature not in (0, 1) for params in distinct),
                has_filters=any(params.top_p < 1 or params.top_k > 0 or params.min_p > 0 for params in distinct),
                has_greedy=any(params.temperature == 0 for params in distinct),
                has_draws=any(params.temperature > 0 for params in distinct),
            ),
        )

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """All parameters, row by row."""
        return (self.streams_B, self.divisor_B1, self.greedy_B, self.top_p_B, self.top_k_B, self.min_p_B)


@dataclass(frozen=True)
class Drawn:
    """One token per row, with its log-prob under the distribution scaled by the temperature and not filtered."""

    tokens_B: Tensor
    logprobs_B: Tensor


def draw(logits_BV: Tensor, positions_B: Tensor, rows: RowSampling, never: Tensor | None = None) -> Drawn:
    """Draw the token at `positions_B` (counted from the prompt's start) of each row; float32 logits.

    Ids in `never` aren't drawn, but stay part of the distribution of log-probs, as in training. At temperature 0 the
    token is the likeliest one and the log-prob is that of temperature 1.
    """
    scaled_BV = logits_BV / rows.divisor_B1 if rows.kinds.has_scaling else logits_BV
    # In the same steps as training, as log_softmax rounds differently.
    scaled_BV = scaled_BV - scaled_BV.amax(-1, keepdim=True)
    weights_BV = scaled_BV.exp()
    log_sum_B = weights_BV.sum(-1).log()
    if never is not None:
        weights_BV.index_fill_(-1, never, 0)
        if rows.kinds.has_greedy:
            logits_BV = logits_BV.index_fill(-1, never, -math.inf)
    if not rows.kinds.has_draws:
        tokens_B = logits_BV.argmax(-1)
    else:
        if rows.kinds.has_filters:
            weights_BV = keep_likely(weights_BV, rows)
        tokens_B = ops.invert_cdf(weights_BV, uniforms(rows.streams_B, positions_B))
        if rows.kinds.has_greedy:
            tokens_B = torch.where(rows.greedy_B, logits_BV.argmax(-1), tokens_B)
    return Drawn(tokens_B, scaled_BV.gather(-1, tokens_B[:, None]).squeeze(-1) - log_sum_B)


def keep_likely(probs_BV: Tensor, rows: RowSampling) -> Tensor:
    """Zero the probabilities dropped by min-p, then by top-k, then by top-p over the rest.

    Each keeps a prefix of the tokens in descending order (ties by token number), so that the shortest prefix decides.
    The likeliest token always stays.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    num_tokens = probs_BV.shape[-1]
    top_k_B = torch.where(rows.top_k_B > 0, rows.top_k_B, num_tokens)
    rank_V = torch.arange(num_tokens, device=probs_BV.device)
    kept_BV = (rank_V < top_k_B[:, None]) & (sorted_BV >= rows.min_p_B[:, None] * sorted_BV[:, :1])
    sorted_BV = sorted_BV * kept_BV
    mass_before_BV = plain.cumulated(sorted_BV) - sorted_BV
    enough_B = torch.where(rows.top_p_B < 1, rows.top_p_B * sorted_BV.sum(-1), float("inf"))
    sorted_BV = sorted_BV * (mass_before_BV < enough_B[:, None])
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV)


def uniforms(streams_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return one float32 uniform number in [0, 1) per row, a pure function of its stream and position.

    A stream is `splitmix64` of a seed: seeds that differ by the gamma would otherwise share a shifted sequence.
    """
    bits_B = splitmix64(streams_B + positions_B * _GOLDEN_GAMMA)
    return logical_shift_right(bits_B, 40).to(torch.float32) * 2.0**-24


def splitmix64(counter: Tensor) -> Tensor:
    """Return the output of splitmix64 after the state `counter`, elementwise on int64."""
    mixed = counter + _GOLDEN_GAMMA
    mixed = (mixed ^ logical_shift_right(mixed, 30)) * _MIX_FIRST
    mixed = (mixed ^ logical_shift_right(mixed, 27)) * _MIX_SECOND
    return mixed ^ logical_shift_right(mixed, 31)


def logical_shift_right(values: Tensor, num_bits: int) -> Tensor:
    """Shift int64 as if unsigned: torch's own shift copies the sign bit."""
    return (values >> num_bits) & ((1 << (64 - num_bits)) - 1)


class RowDrawer:
    """Sampler of tokens with the sampling parameters of each row's request."""

    def __init__(self, device: torch.device, decode: Decode | None, never: Sequence[int] = ()):
        """Rows with stop strings need `decode`, the text of tokens; the ids in `never` aren't drawn."""
        self._device = device
        self._decode = decode
        self.never = torch.tensor(never, dtype=torch.int64, device=device) if never else None
        self._sampling: tuple[list[Row], RowSampling] | None = None

    @property
    def reads_text(self) -> bool:
        """True if rows may have stop strings."""
        return self._decode is not None

    def __call__(self, rows: list[Row], logits_BV: Tensor, version: int) -> list[tuple[Row, Finish]]:
        """Append each row's next token; returns the rows that end with it, with the reason.

        Raises RuntimeError if logits aren't finite.
        """
        positions_B = torch.tensor([row.length for row in rows], device=self._device)
        drawn = draw(logits_BV, positions_B, self.sampling_of(rows), self.never)
        return self.append(rows, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), version)

    def append(
        self, rows: Sequence[Row], tokens: Sequence[int], logprobs: Sequence[float], version: int
    ) -> list[tuple[Row, Finish]]:
        """Append given tokens and log-probs; returns the rows that end with them, with the reason."""
        if not all(map(math.isfinite, logprobs)):
            raise RuntimeError(f"the logits of policy version {version} aren't finite; its weights are broken")
        ended = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            finish = self._append(row, token, logprob, version)
            if finish is not None:
                ended.append((row, finish))
        return ended

    def _append(self, row: Row, token: int, logprob: float, version: int) -> Finish | None:
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        row.versions.append(version)
        return self._finish(row)

    def forget(self) -> None:
        """Drop the cached parameters."""
        self._sampling = None

    def sampling_of(self, rows: list[Row]) -> RowSampling:
        """Return the rows' parameters and random numbers, on the device."""
        # Most steps draw for the rows of the previous one.
        if self._sampling is None or self._sampling[0] != rows:
            seeds, sampling = [row.seed for row in rows], [row.request.sampling for row in rows]
            self._sampling = (rows, RowSampling.of_rows(seeds, sampling, self._device))
        return self._sampling[1]

    def _finish(self, row: Row) -> Finish | None:
        """Return the reason for the row to end with its newest token, or None if it continues."""
        finish, stop_strings = row.finish, row.request.sampling.stop_strings
        if finish != "stop" and stop_strings:
            assert self._decode is not None, f"row {row.row} has stop strings, which submit refuses"
            if completes_stop_string(row.token_ids, stop_strings, self._decode):
                return "stop"
        return finish
