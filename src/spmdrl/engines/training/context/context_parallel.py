"""A context rank's share of a micro-batch, and its attention: packed, by ring, or by exchanging tokens for heads.

Shape letters: `C` context ranks, `T` tokens of one, `A` of all, `R` ratings of all, `P` of one, `H` query heads, `h`
query heads of one rank, `J` key and value heads, `K` head size of queries and keys, `U` of values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.kernels.packed import PackedRows, Sinks, Window
from spmdrl.engines.models.kernels.prefixed import Copies
from spmdrl.engines.models.layers import Attend, Mix, PackedCausalAttention, Recurrence, SharedPromptAttention
from spmdrl.engines.parallel.axis_collectives import exchange_rows, gather_own_gradient
from spmdrl.engines.training.context.hand_over import HandOver
from spmdrl.engines.training.context.ring_attention import RingAttention
from spmdrl.engines.training.context.token_placement import Placement, RatedTokens
from spmdrl.engines.training.packed_rows import MicroBatch
from spmdrl.resources.device import to_device
from spmdrl.resources.layout import ContextKind
from spmdrl.resources.mesh import Axis


def check_context_parallel(
    config: DecoderConfig, key: str = "resources.update", *, tensor: int, context: int, kind: ContextKind
) -> None:
    """Raise ValueError if the model's heads can't be divided over a context axis; a ring takes any model."""
    if kind == "ring" or context == 1:
        return
    for mixer in {mixer for mixer in config.mixers if not mixer.state(1).kind.is_slot}:
        num_heads, num_kv_heads = mixer.num_heads // tensor, max(1, mixer.num_kv_heads // tensor)
        degrees = (degree for degree in range(1, num_heads + 1) if num_heads % degree == 0)
        fitting = [degree for degree in degrees if num_kv_heads % degree == 0 or degree % num_kv_heads == 0]
        if context not in fitting:
            raise ValueError(
                f"{key}.context {context} with {key}.context_kind ulysses deals out heads, but each "
                f"tensor rank has {num_heads} query heads ({mixer.num_heads} / {key}.tensor {tensor}) and "
                f"{num_kv_heads} key and value heads; context must divide the first, and the second must be a multiple "
                f"or a divisor of it: set {key}.context to one of {fitting}, or context_kind to ring"
            )


def share_of(micro: MicroBatch, rated_R: Tensor, placement: Placement) -> MicroBatch:
    """Return this context rank's share of a micro-batch; `rated_R` are its tokens to rate, on the host."""
    device, rated = micro.tokens_T.device, RatedTokens.of(placement, rated_R)
    source_T, index_P = to_device(placement.source_T, device), to_device(rated.index_P, device)
    packed_T = source_T if micro.source_T is None else at_places(micro.source_T, source_T, padding=-1)
    return replace(
        micro,
        tokens_T=at_places(micro.tokens_T, source_T, padding=0),
        positions_T=at_places(micro.positions_T, source_T, padding=0),
        row_T=at_places(micro.row_T, source_T, padding=-1),
        attend=mix_of(micro.attend, placement, device),
        places_P=to_device(rated.places_P, device),
        targets_P=None if micro.targets_P is None else micro.targets_P[index_P],
        copies=None if micro.copies is None else Copies.of(rated.places_P).to(device),
        source_T=packed_T,
        gather_R=None if placement.context.size == 1 else GatherRatings.of(rated, placement.context, device),
    )


def at_places(values_A: Tensor, source_T: Tensor, *, padding: int) -> Tensor:
    """Return values [T, ...] of packed tokens for indexes of them at a rank's places, -1 at padding."""
    at_padding = (source_T < 0).view(-1, *[1] * (values_A.ndim - 1))
    return values_A[source_T.clamp(min=0)].masked_fill_(at_padding, padding)


@dataclass(frozen=True)
class GatherRatings:
    """Ratings of all context ranks, gathered in the order of the rows on every rank. Collective over the axis.

    Backward keeps this rank's part, because every rank computes the same loss of all ratings.
    """

    counts: tuple[int, ...]
    order_R: Tensor
    context: Axis

    @classmethod
    def of(cls, rated: RatedTokens, context: Axis, device: torch.device) -> GatherRatings:
        return cls(rated.counts, to_device(rated.order_R, device), context)

    def __call__(self, values_P: Tensor) -> Tensor:
        return gather_own_gradient(values_P, self.counts, self.context).index_select(0, self.order_R)


def mix_of(attend: Mix, placement: Placement, device: torch.device) -> Mix:
    """Return how one micro-batch's placed tokens meet, from how its packed ones do; a ring has its own attention."""
    context = placement.context
    if placement.kind == "ring" and context.size > 1:
        chunk_lengths_B = (placement.offsets.diff() // (2 * context.size)).tolist()
        # Rows end in padding, after which no token of theirs follows.
        handed = HandOver(PackedRows(placement.offsets).segments, placement.owner, context)
        ring = RingAttention(chunk_lengths_B, context, device)
        return PlacedMix(WithoutPadding(ring, handed.num_tokens), handed, handed.num_tokens)
    inside_rows = WithoutPadding(attend, int(placement.offsets[-1]))
    if context.size == 1:
        return PlacedMix(inside_rows, attend, int(placement.offsets[-1]))
    assert isinstance(attend, PackedCausalAttention | SharedPromptAttention), "tokens are placed once"
    handed = HandOver(attend.segments, placement.owner, context)
    return PlacedMix(UlyssesAttention(inside_rows, context), handed, handed.num_tokens)


class PlacedMix:
    """Attention of a rank's placed tokens, and the recurrence of those before its padding; a `Mix`."""

    def __init__(self, attend: Attend, recurrence: Recurrence, num_tokens: int):
        self._attend, self._recurrence, self._num_tokens = attend, recurrence, num_tokens

    def __call__(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, *, window: Window = None, sinks_H: Sinks = None
    ) -> Tensor:
        return self._attend(layer, q_THK, k_TJK, v_TJU, window=window, sinks_H=sinks_H)

    def convolve(self, layer: int, values_TC: Tensor, weight_CW: Tensor) -> Tensor:
        return self._padded(self._recurrence.convolve(layer, values_TC[: self._num_tokens], weight_CW), values_TC)

    def recur(
        self, layer: int, q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        q, k, v, log_decay, beta = (x[: self._num_tokens] for x in (q_TGK, k_TGK, v_THU, log_decay_TH, beta_TH))
        return self._padded(self._recurrence.recur(layer, q, k, v, log_decay, beta), v_THU)

    def _padded(self, values: Tensor, like: Tensor) -> Tensor:
        return F.pad(values, (*[0, 0] * (values.ndim - 1), 0, len(like) - len(values)))


class WithoutPadding:
    """Attention without the tokens behind the rows: they attend to nothing and get zeros."""

    def __init__(self, attend: Attend, num_tokens: int):
        self._attend, self._num_tokens = attend, num_tokens

    def __call__(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, *, window: Window = None, sinks_H: Sinks = None
    ) -> Tensor:
        num_padding = q_THK.shape[0] - self._num_tokens
        if num_padding == 0:
            return self._attend(layer, q_THK, k_TJK, v_TJU, window=window, sinks_H=sinks_H)
        q, k, v = (heads[: self._num_tokens] for heads in (q_THK, k_TJK, v_TJU))
        attended = self._attend(layer, q, k, v, window=window, sinks_H=sinks_H)
        return F.pad(attended, (0, 0, 0, 0, 0, num_padding))


class UlyssesAttention:
    """Attention of all tokens for a share of the heads, between two all-to-alls (DeepSpeed-Ulysses, arXiv:2309.14509).

    Each context rank has equally many consecutive tokens. Collective over the axis, forward and backward.
    """

    def __init__(self, attend: Attend, context: Axis):
        """`attend` is the attention of the tokens of all ranks."""
        self._attend, self._context = attend, context

    def __call__(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, *, window: Window = None, sinks_H: Sinks = None
    ) -> Tensor:
        size = self._context.size
        # With fewer key heads than ranks, ranks whose query heads share a key head all get it.
        repeats = max(1, size // k_TJK.shape[1])
        if repeats > 1:
            k_TJK, v_TJU = k_TJK.repeat_interleave(repeats, dim=1), v_TJU.repeat_interleave(repeats, dim=1)
        by_rank = [heads.unflatten(1, (size, -1)) for heads in (q_THK, k_TJK, v_TJU)]
        # One exchange for all three: [T, C, heads of one rank x head size] side by side.
        joined = torch.cat([heads.flatten(2) for heads in by_rank], dim=-1)
        parts = self._exchange(joined.transpose(0, 1)).split([heads[0, 0].numel() for heads in by_rank], dim=-1)
        q, k, v = (part.unflatten(-1, heads.shape[2:]) for part, heads in zip(parts, by_rank, strict=True))
        sinks_h = None if sinks_H is None else sinks_H.chunk(size)[self._context.rank]
        attended_AhU = self._attend(layer, q, k, v, window=window, sinks_H=sinks_h)
        attended_CThU = self._exchange(attended_AhU.unflatten(0, (size, -1))).unflatten(0, (size, -1))
        return attended_CThU.transpose(0, 1).flatten(1, 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send parts[c] [T, ...] to rank c; return the received parts, joined in rank order."""
        counts = [parts.shape[1]] * self._context.size
        return exchange_rows(parts.flatten(0, 1), counts, counts, self._context)
