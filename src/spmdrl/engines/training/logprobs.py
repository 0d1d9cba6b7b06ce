"""Log-probabilities and entropies of target tokens from hidden states, without ever holding all logits.

The vocabulary may be cut over the tensor axis: each rank then computes its own logits, and only sums a row long travel.

Shape letters: `R` rows of hidden states (one a target), `D` model width, `V` vocabulary or this rank's part of it,
`C` rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.plain import linear
from spmdrl.engines.parallel.vocabulary import VocabularyPart
from spmdrl.resources.mesh import Axis

LOGITS_CHUNK_BYTES = 128 << 20
"""Size of one float32 [C, V] tensor; about three of them live at a time."""


def logprobs_and_entropy(
    hidden_RD: Tensor,
    head_weight_VD: Tensor,
    targets_R: Tensor,
    *,
    temperature: float = 1.0,
    vocabulary: VocabularyPart | None = None,
    chunk_bytes: int = LOGITS_CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """log p(target) [R] and entropy in nats [R] under p = softmax(hidden @ head.T / temperature), both float32.

    The matrix product runs in the dtype of its inputs, all else in float32. Logits are computed chunk by chunk, and
    again in backward. Both outputs have gradients to `hidden_RD` and `head_weight_VD`.

    With a `vocabulary` this is collective over its axis in forward, not in backward: all its ranks give the same
    hidden states and targets and get the same results. Going back from the same loss on each of them, the gradient
    to `hidden_RD` is this rank's part of a sum over the axis.
    """
    if vocabulary is None:
        vocabulary = VocabularyPart.of(len(head_weight_VD), Axis("tensor", 1, 0, None, (0,)))
    return _LogprobsAndEntropy.apply(hidden_RD, head_weight_VD, targets_R, temperature, vocabulary, chunk_bytes)


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_weight_VD: Tensor,
        targets_R: Tensor,
        temperature: float,
        vocabulary: VocabularyPart,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        # Parts may differ in size, but their ranks must go through the same chunks.
        chunks = list(_chunks(len(targets_R), vocabulary.widest, chunk_bytes))
        logprobs_R = hidden_RD.new_empty(len(targets_R), dtype=torch.float32)
        entropy_R, normalizer_R = torch.empty_like(logprobs_R), torch.empty_like(logprobs_R)
        for rows in chunks:
            logits_CV = _logits(hidden_RD[rows], head_weight_VD, temperature)
            logprobs_R[rows], entropy_R[rows], normalizer_R[rows] = _rate(logits_CV, targets_R[rows], vocabulary)
            # Else this chunk would outlive the computation of the next.
            del logits_CV
        ctx.save_for_backward(hidden_RD, head_weight_VD, targets_R, entropy_R, normalizer_R)
        ctx.temperature, ctx.vocabulary, ctx.chunks = temperature, vocabulary, chunks
        ctx.set_materialize_grads(False)
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RD, head_weight_VD, targets_R, entropy_R, normalizer_R = ctx.saved_tensors
        by_logprob_R, by_entropy_R = (None if given is None else given / ctx.temperature for given in gradients)
        by_hidden_RD = torch.zeros_like(hidden_RD)
        by_head_VD = torch.zeros_like(head_weight_VD, dtype=torch.float32)
        for rows in ctx.chunks:
            logprobs_CV = _logits(hidden_RD[rows], head_weight_VD, ctx.temperature).sub_(normalizer_R[rows, None])
            by_logits_CV = _minus_expected(
                logprobs_CV,
                entropy_R[rows],
                by_logprob_C=None if by_logprob_R is None else by_logprob_R[rows],
                by_entropy_C=None if by_entropy_R is None else by_entropy_R[rows],
            )
            if by_logprob_R is not None:
                columns_C, here_C = ctx.vocabulary.local(targets_R[rows])
                by_logits_CV.scatter_add_(1, columns_C[:, None], (by_logprob_R[rows] * here_C)[:, None])
            del logprobs_CV
            by_logits_CV = by_logits_CV.to(head_weight_VD.dtype)
            by_hidden_RD[rows] = by_logits_CV @ head_weight_VD
            ops.add_matmul(by_head_VD, by_logits_CV, hidden_RD[rows])
            del by_logits_CV
        return by_hidden_RD, by_head_VD.to(head_weight_VD.dtype), None, None, None, None


def _chunks(num_rows: int, vocab_size: int, chunk_bytes: int) -> Iterator[slice]:
    """Even chunks of at most `chunk_bytes` of float32 logits, but of at least one row."""
    if num_rows == 0:
        return
    rows_allowed = max(1, chunk_bytes // (vocab_size * 4))
    count = -(-num_rows // rows_allowed)
    bounds = [num_rows * k // count for k in range(count + 1)]
    yield from (slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True))


def _logits(hidden_CD: Tensor, head_weight_VD: Tensor, temperature: float) -> Tensor:
    return linear(hidden_CD, head_weight_VD).to(torch.float32).div_(temperature)


def _rate(logits_CV: Tensor, targets_C: Tensor, vocabulary: VocabularyPart) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy and log of the sum of exp(logits), each [C]; overwrites `logits_CV`.

    With z = logits - max and S = sum exp z these are z_t - log S, log S - sum(z exp z) / S and max + log S, so that
    only sums over the vocabulary are needed.
    """
    max_C = vocabulary.axis.max(logits_CV.amax(-1))
    logits_CV.sub_(max_C[:, None])
    columns_C, here_C = vocabulary.local(targets_C)
    target_C = logits_CV.gather(1, columns_C[:, None]).squeeze(1) * here_C
    exp_CV = logits_CV.exp()
    sum_C = exp_CV.sum(-1)
    weighted_C = exp_CV.mul_(logits_CV).sum(-1)
    target_C, sum_C, weighted_C = vocabulary.axis.sum(torch.stack((target_C, sum_C, weighted_C)))
    log_sum_C = sum_C.log()
    return target_C - log_sum_C, log_sum_C - weighted_C / sum_C, max_C + log_sum_C


def _minus_expected(
    logprobs_CV: Tensor, entropy_C: Tensor, *, by_logprob_C: Tensor | None, by_entropy_C: Tensor | None
) -> Tensor:
    """-p * (g + h * (log p + H)), overwriting `logprobs_CV`.

    d/dz of g * log p_t + h * H is this and g at the target.
    """
    p_CV = logprobs_CV.exp()
    if by_entropy_C is None:
        assert by_logprob_C is not None, "backward is called for the gradient of at least one output"
        return p_CV.mul_(-by_logprob_C[:, None])
    factor_CV = logprobs_CV.add_(entropy_C[:, None]).mul_(by_entropy_C[:, None])
    if by_logprob_C is not None:
        factor_CV.add_(by_logprob_C[:, None])
    return factor_CV.mul_(p_CV).neg_()
