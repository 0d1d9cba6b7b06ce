"""Tensor and sequence parallelism, applied from outside: cuts a decoder's matrices, and in training its tokens.

Megatron-LM's scheme (arXiv:1909.08053, section 3): attention and feed-forward layers compute their own heads or
columns, and the layer's output is the sum over ranks. In training, layers gather the tokens and scatter those sums, so
that everything between them sees an equal share of the tokens (sequence parallel; arXiv:2205.05198, section 4.2). A
weight that isn't cut then gets a part of its gradient on each rank, to be summed. In generation, with few tokens per
step, all ranks have all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.layers import Linear
from spmdrl.engines.models.lora import AdaptedLinear
from spmdrl.engines.models.moe import Experts
from spmdrl.engines.parallel.axis_collectives import gather_rows, scatter_row_sums
from spmdrl.engines.parallel.weight_cuts import (
    Parts,
    TensorCopies,
    VocabularyPart,
    is_of_experts,
    is_summed,
    tensor_cut,
)
from spmdrl.resources.mesh import Axis

SUM_BYTES = 64 << 20
"""Most bytes of gradients in one sum, unless a single one is larger."""


def check_tensor_parallel(config: DecoderConfig, tensor: int, key: str) -> None:
    """Raise ValueError, naming the degree by its config key, if a model can't be cut over this many ranks.

    Needs no communication.
    """
    complaint = _complaint(config, tensor)
    if complaint:
        most = max(mixer.num_heads for mixer in config.mixers)
        usable = [degree for degree in range(1, most + 1) if not _complaint(config, degree)]
        raise ValueError(f"{key} is {tensor}, but {complaint}; set it to one of {usable}")


def _complaint(config: DecoderConfig, tensor: int) -> str | None:
    """Return the rule that this degree breaks, or None."""
    for name, width in _widths(config).items():
        if width % tensor:
            return f"it must divide the model's {name} {width}"
    for num_kv_heads in {mixer.num_kv_heads for mixer in config.mixers}:
        if num_kv_heads % tensor and tensor % num_kv_heads:
            return f"it must divide the model's num_key_value_heads {num_kv_heads} or be a multiple of it"
    if -(-config.vocab_size // tensor) * (tensor - 1) >= config.vocab_size:
        return f"it gives some rank no part of the model's vocab_size {config.vocab_size}"
    return None


def _widths(config: DecoderConfig) -> dict[str, int]:
    """Return the sizes that are cut in equal parts, by their name in config.json."""
    widths = {"num_attention_heads": config.num_heads}
    if config.delta is not None:
        widths["linear_num_value_heads"] = config.delta.num_value_heads
    if config.moe is None or config.moe.dense_layers:
        widths["intermediate_size"] = config.intermediate_size
    if config.moe is not None:
        widths["moe_intermediate_size"] = config.moe.intermediate_size
        widths["shared_expert_intermediate_size"] = config.moe.shared_width
    return widths


def apply_tensor_parallel(
    decoder: Decoder, axis: Axis, parts: Parts, *, shares_tokens: bool = True, cuts_experts: bool = True
) -> None:
    """Make a decoder on the meta device compute this rank's part; names stay, shapes shrink, `parts` follows.

    With `shares_tokens`, their number must be a multiple of the axis's size; without, there are no gradients. Uncut
    experts add up like parts: each must be held once. Collective from then on: the ranks run it together.
    """
    if axis.size == 1:
        return
    vocabulary = VocabularyPart.of(decoder.config.vocab_size, axis)
    for name in parts.shapes:
        if cuts_experts or not is_of_experts(name):
            _cut(decoder, name, axis, parts)
        _share_bias(decoder, name, axis, cuts_experts=cuts_experts)
    if "model.embed_tokens.weight" in parts.shapes:
        decoder.model.embed_tokens = _EmbeddingPart(decoder.model.embedding.weight, vocabulary, shares_tokens)
    for layer in decoder.layers:
        for block in (layer.mixer, layer.mlp):
            (_share_tokens if shares_tokens else _sum_outputs)(block, axis)


def _cut(decoder: Decoder, name: str, axis: Axis, parts: Parts) -> None:
    """Cut one weight, if the table of cuts has it."""
    cut = tensor_cut(decoder.config, name, parts.shapes[name])
    if cut is not None:
        parts.cut(decoder, name, cut.dim, *cut.interval(parts.shapes[name][cut.dim], axis.size, axis.rank))
        distinct = cut.num_distinct(axis.size)
        parts.tensor_copies[name] = TensorCopies(distinct, axis.rank * distinct // axis.size)


def _share_tokens(block: nn.Module, axis: Axis) -> None:
    """Gather the block's input tokens and reduce-scatter its outputs, which are partial sums."""

    def gather(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_rows(inputs[0], axis), *inputs[1:]

    def scatter(block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return scatter_row_sums(output, axis)

    block.register_forward_pre_hook(gather)
    block.register_forward_hook(scatter)


def _sum_outputs(block: nn.Module, axis: Axis) -> None:
    """All-reduce the block's outputs, which are partial sums."""

    def add_up(block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return axis.sum(output)

    block.register_forward_hook(add_up)


def _share_bias(decoder: Decoder, name: str, axis: Axis, *, cuts_experts: bool) -> None:
    """Scale a bias whose projection's outputs are summed, so that it counts once."""
    path, _, kind = name.rpartition(".")
    if is_of_experts(name) and kind == "down_proj_bias" and cuts_experts:
        experts = decoder.get_submodule(path)
        assert isinstance(experts, Experts), name
        experts.num_bias_shares = axis.size
    parent, _, projection = path.rpartition(".")
    if kind == "bias" and is_summed(decoder.config, name):
        linear = decoder.get_submodule(path)
        assert isinstance(linear, Linear), name
        if isinstance(linear, AdaptedLinear):
            linear.num_bias_shares = axis.size
        else:
            setattr(decoder.get_submodule(parent), projection, _SharedBiasLinear(linear, axis.size))


class _SharedBiasLinear(nn.Module):
    """Projection whose outputs are summed over ranks, each of which adds its share of the bias."""

    def __init__(self, linear: Linear, num_ranks: int):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.num_ranks = num_ranks

    def forward(self, values: Tensor) -> Tensor:
        return ops.linear(values, self.weight, self.bias / self.num_ranks)


class _EmbeddingPart(nn.Embedding):
    """Embedding of this rank's part of the vocabulary; the sum over ranks covers every token."""

    def __init__(self, weight: Tensor, vocabulary: VocabularyPart, shares_tokens: bool):
        super().__init__(len(weight), weight.shape[1], device="meta")
        self.weight = weight
        self.vocabulary = vocabulary
        self.shares_tokens = shares_tokens

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Return hidden states of all tokens, or of this rank's equal share of them."""
        places_T, here_T = self.vocabulary.local(tokens_T)
        found_TD = F.embedding(places_T, self.weight) * here_T[:, None]
        axis = self.vocabulary.axis
        return scatter_row_sums(found_TD, axis) if self.shares_tokens else axis.sum(found_TD)


def is_first(name: str, axis: Axis, parts: Parts) -> bool:
    """Return True if this rank is the first on the tensor axis that holds its slice of a weight."""
    copies = parts.tensor_copies[name]
    return axis.rank == copies.index * (axis.size // copies.distinct)


def sum_tensor_gradients(
    gradients: Mapping[str, Tensor], parts: Parts, axis: Axis, *, sum_bytes: int = SUM_BYTES
) -> None:
    """Replace, in place, each gradient by the sum over the ranks that hold the same slice. Collective over the axis.

    Takes the locally stored part of each gradient; ranks of the axis store equal sizes under the same names, in the
    same order.
    """
    shared = {name: gradient for name, gradient in gradients.items() if parts.tensor_copies[name].distinct < axis.size}
    for bucket in _buckets(shared, parts, sum_bytes):
        _sum_bucket(bucket, parts, axis)


def _buckets(gradients: Mapping[str, Tensor], parts: Parts, sum_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield runs of gradients of one dtype of at most `sum_bytes` in transfer; a larger gradient is alone."""
    bucket: dict[str, Tensor] = {}
    num_bytes = 0
    dtype = None
    for name, gradient in gradients.items():
        needed = gradient.nbytes * parts.tensor_copies[name].distinct
        if bucket and (num_bytes + needed > sum_bytes or gradient.dtype != dtype):
            yield bucket
            bucket, num_bytes = {}, 0
        bucket[name] = gradient
        num_bytes, dtype = num_bytes + needed, gradient.dtype
    if bucket:
        yield bucket


def _sum_bucket(bucket: Mapping[str, Tensor], parts: Parts, axis: Axis) -> None:
    """Sum the gradients of one bucket, which has a place for every distinct slice of a weight."""
    spread = []
    for name, gradient in bucket.items():
        copies = parts.tensor_copies[name]
        places = gradient.new_zeros(copies.distinct, gradient.numel())
        places[copies.index] = gradient.flatten()
        spread.append(places.flatten())
    summed = axis.sum(torch.cat(spread)).split([places.numel() for places in spread])
    for (name, gradient), total in zip(bucket.items(), summed, strict=True):
        copies = parts.tensor_copies[name]
        gradient.copy_(total.view(copies.distinct, -1)[copies.index].view_as(gradient))
