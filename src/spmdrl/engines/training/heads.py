"""An engine's heads on a micro-batch's hidden states: log-probabilities for a policy, values for critic and reward.

A head is made for one micro-batch and passed to the decoder, which calls it inside its own forward. Under tensor
parallelism it gets this rank's share of the tokens and rates all of them; the vocabulary is cut over the axis, so each
rank computes its own logits, and only sums per place are exchanged. All logits are never in memory at once.

Shape letters: `T` packed tokens of the micro-batch, or this rank's equal share of them; `P` places to rate; `D` model
width; `V` vocabulary, or this rank's part of it; `C` places of one chunk; `J` tokens that are rated at each place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.prefixed import Copies, copy_rows
from spmdrl.engines.parallel.axis_collectives import gather_own_gradient, gather_rows
from spmdrl.engines.parallel.weight_cuts import VocabularyPart
from spmdrl.nouns.roles import Rating
from spmdrl.resources.mesh import Axis

_CHUNK_BYTES_ON_CPU, _CHUNK_BYTES = 128 << 20, 512 << 20
"""Size of one float32 [C, V] tensor; up to three of them are alive at a time, with a softcap four. On accelerators each
chunk adds a whole gradient of the head to the one before, which takes longer than the product where chunks are small.
"""
NOTHING = -1e4
"""Log-prob of an empty set of tokens: finite, so that differences stay defined."""


class TokenHead(Protocol):
    """Head that rates places of one micro-batch by their hidden states."""

    def __call__(self, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        """Return float32 tensors [P], the same on all ranks of the tensor axis. Collective over that axis.

        A tuple even of one, because FSDP2 looks for tensors with gradients in a forward's outputs.
        """
        ...


@dataclass(frozen=True)
class LogprobHead:
    """Log-probability of the token after each place, and the entropy of its distribution: a language model's head."""

    places_P: Tensor
    """Predicting tokens, by their place in the micro-batch."""
    targets_P: Tensor
    """Token after each place; or [P, J], that token and others."""
    vocabulary: VocabularyPart | None = None
    """This rank's part, if a tensor axis cuts the vocabulary."""
    temperature: float = 1.0
    softcap: float | None = None
    """As in `DecoderConfig`."""
    copies: Copies | None = None
    """As in `MicroBatch`."""

    def __call__(self, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        """Return log-probs and entropies [P]; with other tokens, also log-probs of these and of the rest [P, J]."""
        if self.vocabulary is not None:
            hidden_TD = gather_rows(hidden_TD, self.vocabulary.axis)
        hidden_PD = _at_places(hidden_TD, self.places_P, self.copies)
        return logprobs_and_entropy(
            hidden_PD,
            weight_VD,
            self.targets_P,
            temperature=self.temperature,
            softcap=self.softcap,
            vocabulary=self.vocabulary,
        )


@dataclass(frozen=True)
class LikeliestHead:
    """The likeliest tokens after each place, and their log-probabilities, for a student to compare with."""

    places_P: Tensor
    num_likeliest: int
    """Tokens per place (J)."""
    vocab_size: int
    """Tokens from here on are excluded; their probability counts."""
    vocabulary: VocabularyPart | None = None
    """This rank's part, if a tensor axis cuts the vocabulary."""
    temperature: float = 1.0
    softcap: float | None = None
    """As in `DecoderConfig`."""
    copies: Copies | None = None
    """As in `MicroBatch`."""

    def __call__(self, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids [P, J], int64, likeliest first, and log-probs of these and of the rest [P, J + 1]."""
        if self.vocabulary is not None:
            hidden_TD = gather_rows(hidden_TD, self.vocabulary.axis)
        hidden_PD = _at_places(hidden_TD, self.places_P, self.copies)
        widest = len(weight_VD) if self.vocabulary is None else self.vocabulary.widest
        ids_PJ = self.places_P.new_empty(len(hidden_PD), self.num_likeliest)
        logprobs_PJ = hidden_PD.new_empty((len(hidden_PD), self.num_likeliest + 1), dtype=torch.float32)
        for rows in _chunks(len(hidden_PD), widest, _chunk_bytes(hidden_PD)):
            logits_CV = _logits(hidden_PD[rows], weight_VD, self.temperature, self.softcap)
            ids_CJ, largest_CJ = self._largest(logits_CV)
            rated = _rate(logits_CV, ids_CJ, self.vocabulary)
            ids_PJ[rows] = ids_CJ
            logprobs_PJ[rows, :-1] = largest_CJ - (rated.highest_C + rated.log_sum_C)[:, None]
            logprobs_PJ[rows, -1] = _rest(logits_CV, ids_CJ, self.vocabulary) - rated.log_sum_C
        return ids_PJ, logprobs_PJ

    def _largest(self, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens with the largest logits, and these, each [C, J]."""
        part, start = self.vocabulary, 0 if self.vocabulary is None else self.vocabulary.start
        allowed_CV = logits_CV[:, : max(0, self.vocab_size - start)]
        # Ranks must contribute equally many, of which the last one may have too few.
        num_own = self.num_likeliest if part is None else min(self.num_likeliest, part.widest)
        missing = max(0, num_own - allowed_CV.shape[1])
        largest_CJ, ids_CJ = F.pad(allowed_CV, (0, missing), value=-torch.inf).topk(num_own)
        ids_CJ += start
        if part is None:
            return ids_CJ, largest_CJ
        largest_CJ, ids_CJ = (_side_by_side(own_CJ, part.axis) for own_CJ in (largest_CJ, ids_CJ))
        largest_CJ, places_CJ = largest_CJ.topk(self.num_likeliest)
        return ids_CJ.gather(1, places_CJ), largest_CJ


def _side_by_side(own_CJ: Tensor, axis: Axis) -> Tensor:
    """Return the columns of all ranks [C, ranks * J]. Collective over the axis."""
    return gather_rows(own_CJ, axis).unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class ValueHead:
    """One number per place: a critic's value before each response token, or a reward model's score at a row's end.

    The weight [1, D] is whole on every rank of the tensor axis. Each rank rates its own tokens, so that its gradient is
    a part of a sum over the axis, like every uncut weight's.
    """

    places_P: Tensor
    """Tokens to rate, by their place in the micro-batch."""
    tensor: Axis
    copies: Copies | None = None
    """As in `MicroBatch`."""

    def __call__(self, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor]:
        # In float32: bfloat16 would keep three digits of a return.
        own_T = ops.linear(hidden_TD.to(torch.float32), weight_VD.to(torch.float32)).squeeze(1)
        values_T = gather_own_gradient(own_T, [len(own_T)] * self.tensor.size, self.tensor)
        return (_at_places(values_T, self.places_P, self.copies),)


def _at_places(values_T: Tensor, places_P: Tensor, copies: Copies | None) -> Tensor:
    return values_T[places_P] if copies is None else copy_rows(values_T, copies)


def logprobs_and_entropy(
    hidden_PD: Tensor,
    head_weight_VD: Tensor,
    targets_P: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocabulary: VocabularyPart | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, ...]:
    """Return log p(target) [P] and entropy in nats [P] for p = softmax(hidden @ head.T / temperature), both float32.

    A `softcap` applies to the products before the temperature. With several targets per place, [P, J], log-probs are
    the first target's; a third output has the J - 1 others', followed by that of all remaining tokens together [P, J].
    The matrix product runs in the dtype of its inputs, all else in float32. Logits are computed chunk by chunk, and
    again in backward, except the last chunk's, which are kept unless another call follows. Both outputs have gradients
    to `hidden_PD` and `head_weight_VD`.

    With a `vocabulary` this is collective over its axis in forward, not in backward: all its ranks pass the same hidden
    states and targets and get the same results. With the same loss on each of them, the gradient to `hidden_PD` is this
    rank's part of a sum over the axis.
    """
    targets_PJ = targets_P[:, None] if targets_P.ndim == 1 else targets_P
    scales = temperature, softcap
    rated = _LogprobsAndEntropy.apply(
        hidden_PD, head_weight_VD, targets_PJ, scales, vocabulary, chunk_bytes or _chunk_bytes(hidden_PD)
    )
    return rated[: targets_P.ndim + 1]


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        head_weight_VD: Tensor,
        targets_PJ: Tensor,
        scales: tuple[float, float | None],
        vocabulary: VocabularyPart | None,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Parts may differ in size, but their ranks must go through the same chunks.
        widest = len(head_weight_VD) if vocabulary is None else vocabulary.widest
        chunks = list(_chunks(len(targets_PJ), widest, chunk_bytes))
        # Separate tensors, as FSDP2 accepts no views.
        logprobs_P = hidden_PD.new_empty(len(targets_PJ), dtype=torch.float32)
        entropy_P, highest_P, log_sum_P = (torch.empty_like(logprobs_P) for _ in range(3))
        rates_others = targets_PJ.shape[1] > 1
        others_PJ = logprobs_P.new_empty(len(targets_PJ), targets_PJ.shape[1] if rates_others else 0)
        ctx.last = _LastLogits()
        for rows in chunks:
            logits_CV = _logits(hidden_PD[rows], head_weight_VD, *scales)
            rated = _rate(logits_CV, targets_PJ[rows], vocabulary)
            logprobs_P[rows] = rated.logprobs_CJ[:, 0]
            if rates_others:
                rest_C = _rest(logits_CV, targets_PJ[rows, 1:], vocabulary) - rated.log_sum_C
                others_PJ[rows] = torch.cat((rated.logprobs_CJ[:, 1:], rest_C[:, None]), 1)
            entropy_P[rows], highest_P[rows], log_sum_P[rows] = rated.entropy_C, rated.highest_C, rated.log_sum_C
            if rows is chunks[-1]:
                ctx.last.above_CV = logits_CV
            # Else this chunk would outlive the computation of the next.
            del logits_CV
        rest_P = others_PJ[:, -1] + log_sum_P if rates_others else None
        ctx.save_for_backward(hidden_PD, head_weight_VD, targets_PJ, entropy_P, highest_P, log_sum_P, rest_P)
        ctx.scales, ctx.vocabulary, ctx.chunks = scales, vocabulary, chunks
        ctx.set_materialize_grads(False)
        return logprobs_P, entropy_P, others_PJ

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_PD, head_weight_VD, targets_PJ, entropy_P, highest_P, log_sum_P, rest_P = ctx.saved_tensors
        temperature, softcap = ctx.scales
        by_first_P, by_entropy_P, by_others_PJ = (None if by is None else by / temperature for by in gradients)
        by_logprob_PJ = None if by_first_P is None else by_first_P[:, None]
        if by_others_PJ is not None:
            first_P1 = by_others_PJ.new_zeros(len(by_others_PJ), 1) if by_logprob_PJ is None else by_logprob_PJ
            by_logprob_PJ = torch.cat((first_P1, by_others_PJ), 1)
        by_hidden_PD = torch.zeros_like(hidden_PD)
        by_head_VD = torch.zeros_like(head_weight_VD, dtype=torch.float32)
        # The last one first, so that its kept logits aren't held beside others.
        for rows in reversed(ctx.chunks):
            above_CV = ctx.last.take()
            if above_CV is None:
                above_CV = _logits(hidden_PD[rows], head_weight_VD, *ctx.scales).sub_(highest_P[rows, None])
            slope_CV = None
            if softcap is not None:
                # 1 - tanh^2, where above + highest are tanh * softcap / temperature.
                slope_CV = (above_CV + highest_P[rows, None]).mul_(temperature / softcap).square_().neg_().add_(1)
            by_rest_CV = None
            if by_others_PJ is not None:
                by_rest_CV = _without(above_CV, targets_PJ[rows, 1:], ctx.vocabulary).sub_(rest_P[rows, None]).exp_()
                by_rest_CV.mul_(by_others_PJ[rows, -1:])
            by_logits_CV = ops.minus_expected(
                above_CV,
                log_sum_P[rows],
                entropy_P[rows],
                None if by_logprob_PJ is None else by_logprob_PJ[rows].sum(1),
                None if by_entropy_P is None else by_entropy_P[rows],
            )
            if by_logprob_PJ is not None:
                rated_CJ = targets_PJ[rows, : by_logprob_PJ.shape[1]]
                columns_CJ, here_CJ = _columns(rated_CJ, ctx.vocabulary)
                by_logits_CV.scatter_add_(1, columns_CJ, by_logprob_PJ[rows, : rated_CJ.shape[1]] * here_CJ)
            if by_rest_CV is not None:
                by_logits_CV.add_(by_rest_CV)
            if slope_CV is not None:
                by_logits_CV.mul_(slope_CV)
            del above_CV, by_rest_CV, slope_CV
            by_logits_CV = by_logits_CV.to(head_weight_VD.dtype)
            by_hidden_PD[rows] = ops.linear(by_logits_CV, head_weight_VD.T)
            ops.add_matmul(by_head_VD, by_logits_CV, hidden_PD[rows])
            del by_logits_CV
        return by_hidden_PD, by_head_VD.to(head_weight_VD.dtype), None, None, None, None


class _LastLogits:
    """A call's last logits for backward, until taken or the next call: one chunk per process."""

    _newest: weakref.ref[_LastLogits] | None = None

    def __init__(self) -> None:
        # A schedule of several micro-batches may run all of them forward before the first backward.
        if _LastLogits._newest is not None and (before := _LastLogits._newest()) is not None:
            before.above_CV = None
        self.above_CV: Tensor | None = None
        _LastLogits._newest = weakref.ref(self)

    def take(self) -> Tensor | None:
        above_CV, self.above_CV = self.above_CV, None
        return above_CV


class _Rated(NamedTuple):
    """Log p(target), entropy, highest logit, and the logsumexp of logits relative to it."""

    logprobs_CJ: Tensor
    entropy_C: Tensor
    highest_C: Tensor
    log_sum_C: Tensor


def _chunk_bytes(hidden_PD: Tensor) -> int:
    return _CHUNK_BYTES_ON_CPU if hidden_PD.device.type == "cpu" else _CHUNK_BYTES


def _chunks(num_rows: int, vocab_size: int, chunk_bytes: int) -> Iterator[slice]:
    """Yield even chunks of at most `chunk_bytes` of float32 logits, but of at least one row."""
    if num_rows == 0:
        return
    rows_allowed = max(1, chunk_bytes // (vocab_size * 4))
    count = -(-num_rows // rows_allowed)
    bounds = [num_rows * k // count for k in range(count + 1)]
    yield from (slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True))


def _logits(hidden_CD: Tensor, head_weight_VD: Tensor, temperature: float, softcap: float | None) -> Tensor:
    logits_CV = ops.linear(hidden_CD, head_weight_VD).to(torch.float32)
    if softcap is not None:
        logits_CV = ops.softcap(logits_CV, softcap)
    return logits_CV if temperature == 1 else logits_CV.div_(temperature)


def _columns(targets_CJ: Tensor, vocabulary: VocabularyPart | None) -> tuple[Tensor, Tensor | int]:
    """Return the targets' columns among this rank's logits, and whether they are there."""
    return (targets_CJ, 1) if vocabulary is None else vocabulary.local(targets_CJ)


def _rate(logits_CV: Tensor, targets_CJ: Tensor, vocabulary: VocabularyPart | None) -> _Rated:
    """Rate targets; overwrites the logits by their differences to the highest.

    With z for these and S = sum exp z, a log-prob is z_t - log S and the entropy log S - sum(z exp z) / S, so that only
    sums over the vocabulary are needed.
    """
    highest_C = logits_CV.amax(-1)
    if vocabulary is not None:
        highest_C = vocabulary.axis.max(highest_C)
    sum_C, weighted_C = ops.exponential_sums(logits_CV, highest_C)
    columns_CJ, here_CJ = _columns(targets_CJ, vocabulary)
    target_CJ = logits_CV.gather(1, columns_CJ) * here_CJ
    if vocabulary is not None:
        sums = vocabulary.axis.sum(torch.cat((target_CJ.T, sum_C[None], weighted_C[None])))
        target_CJ, sum_C, weighted_C = sums[:-2].T, sums[-2], sums[-1]
    log_sum_C = sum_C.log()
    return _Rated(target_CJ - log_sum_C[:, None], log_sum_C - weighted_C / sum_C, highest_C, log_sum_C)


def _without(above_CV: Tensor, tokens_CJ: Tensor, vocabulary: VocabularyPart | None) -> Tensor:
    """Return a copy in which these tokens have no probability."""
    columns_CJ, here_CJ = _columns(tokens_CJ, vocabulary)
    # Tokens of other parts map to place 0, which must stay unchanged.
    ends_CJ = torch.where(torch.as_tensor(here_CJ > 0, device=above_CV.device), -torch.inf, torch.inf)
    return above_CV.scatter_reduce(1, columns_CJ, ends_CJ.to(above_CV).expand(columns_CJ.shape), "amin")


def _rest(above_CV: Tensor, tokens_CJ: Tensor, vocabulary: VocabularyPart | None) -> Tensor:
    """Return the logsumexp [C] of all other logits, relative to the highest.

    By 1 - sum of the tokens' probabilities, rounding would lose a rest below 1e-7.
    """
    rest_C = _without(above_CV, tokens_CJ, vocabulary).logsumexp(-1).clamp(min=NOTHING)
    if vocabulary is None:
        return rest_C
    highest_C = vocabulary.axis.max(rest_C)
    return highest_C + vocabulary.axis.sum((rest_C - highest_C).exp()).log()


def check_head(config: DecoderConfig, rating: Rating) -> None:
    """Raise ValueError if the model's head can't give this rating."""
    needed = "vocab" if rating == "logprobs" else "value"
    if config.head != needed:
        raise ValueError(
            f"rating {rating} needs a {needed} head, but the model's is a {config.head} head; give a model folder with "
            "the right head, or start a value head on a language model (DecoderConfig.with_value_head, WithNewHead)"
        )
