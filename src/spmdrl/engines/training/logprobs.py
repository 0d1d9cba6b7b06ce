"""Log-probabilities and entropies of target tokens from hidden states, without ever holding all logits.

Shape letters: `R` rows of hidden states (one a target), `D` model width, `V` vocabulary, `C` rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_CHUNK_BYTES = 128 << 20
"""Size of one float32 [C, V] tensor; about three of them live at a time."""


def logprobs_and_entropy(
    hidden_RD: Tensor,
    head_weight_VD: Tensor,
    targets_R: Tensor,
    *,
    temperature: float = 1.0,
    chunk_bytes: int = LOGITS_CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """log p(target) [R] and entropy in nats [R] under p = softmax(hidden @ head.T / temperature), both float32.

    The matrix product runs in the dtype of its inputs, all else in float32. Logits are computed chunk by chunk, and
    again in backward. Both outputs have gradients to `hidden_RD` and `head_weight_VD`.
    """
    return _LogprobsAndEntropy.apply(hidden_RD, head_weight_VD, targets_R, temperature, chunk_bytes)


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, head_weight_VD: Tensor, targets_R: Tensor, temperature: float, chunk_bytes: int
    ) -> tuple[Tensor, Tensor]:
        logprobs_R = hidden_RD.new_empty(len(targets_R), dtype=torch.float32)
        entropy_R = torch.empty_like(logprobs_R)
        for rows in _chunks(len(targets_R), head_weight_VD.shape[0], chunk_bytes):
            all_CV = _all_logprobs(hidden_RD[rows], head_weight_VD, temperature)
            logprobs_R[rows] = all_CV.gather(1, targets_R[rows, None]).squeeze(1)
            entropy_R[rows] = _entropy(all_CV)
            # Else this chunk would outlive the computation of the next.
            del all_CV
        ctx.save_for_backward(hidden_RD, head_weight_VD, targets_R, entropy_R)
        ctx.temperature, ctx.chunk_bytes = temperature, chunk_bytes
        ctx.set_materialize_grads(False)
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RD, head_weight_VD, targets_R, entropy_R = ctx.saved_tensors
        by_logprob_R, by_entropy_R = gradients
        by_hidden_RD = torch.zeros_like(hidden_RD)
        by_head_VD = torch.zeros_like(head_weight_VD, dtype=torch.float32)
        for rows in _chunks(len(targets_R), head_weight_VD.shape[0], ctx.chunk_bytes):
            all_CV = _all_logprobs(hidden_RD[rows], head_weight_VD, ctx.temperature)
            by_logits_CV = _logits_gradient(
                all_CV,
                targets_R[rows],
                entropy_R[rows],
                by_logprob_C=None if by_logprob_R is None else by_logprob_R[rows],
                by_entropy_C=None if by_entropy_R is None else by_entropy_R[rows],
            )
            by_logits_CV = by_logits_CV.div_(ctx.temperature).to(head_weight_VD.dtype)
            by_hidden_RD[rows] = by_logits_CV @ head_weight_VD
            by_head_VD += by_logits_CV.T @ hidden_RD[rows]
            del all_CV, by_logits_CV
        return by_hidden_RD, by_head_VD.to(head_weight_VD.dtype), None, None, None


def _chunks(num_rows: int, vocab_size: int, chunk_bytes: int) -> Iterator[slice]:
    """Even chunks of at most `chunk_bytes` of float32 logits, but of at least one row."""
    if num_rows == 0:
        return
    rows_allowed = max(1, chunk_bytes // (vocab_size * 4))
    count = -(-num_rows // rows_allowed)
    bounds = [num_rows * k // count for k in range(count + 1)]
    yield from (slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True))


def _all_logprobs(hidden_CD: Tensor, head_weight_VD: Tensor, temperature: float) -> Tensor:
    logits_CV = F.linear(hidden_CD, head_weight_VD).to(torch.float32)
    return torch.log_softmax(logits_CV.div_(temperature), dim=-1)


def _entropy(all_CV: Tensor) -> Tensor:
    # entr(p) is -p log p, and 0 where p is 0.
    return torch.special.entr(all_CV.exp()).sum(-1)


def _logits_gradient(
    all_CV: Tensor, targets_C: Tensor, entropy_C: Tensor, *, by_logprob_C: Tensor | None, by_entropy_C: Tensor | None
) -> Tensor:
    """d/dz of g * log p_t + h * H, which is g * (onehot_t - p) - h * p * (log p + H); overwrites `all_CV`."""
    p_CV = all_CV.exp()
    if by_entropy_C is None:
        by_logits_CV = torch.zeros_like(p_CV)
    else:
        by_logits_CV = all_CV.add_(entropy_C[:, None]).mul_(p_CV).mul_(-by_entropy_C[:, None])
    if by_logprob_C is not None:
        by_logits_CV -= p_CV.mul_(by_logprob_C[:, None])
        by_logits_CV.scatter_add_(1, targets_C[:, None], by_logprob_C[:, None])
    return by_logits_CV
