"""Settings and patches for vLLM's CPU build; nothing here imports vllm.

Its kernels read some weights in a packed form. `reload_weights` repacks linear layers, but neither a head that shares
the embedding's weights nor experts: without `pack_again` an engine uses stale or garbled weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from spmdrl.engines.models.attention import AttentionConfig
from spmdrl.engines.models.decoder import DecoderConfig

_EXPERT_WIDTH_MULTIPLE = 32
_CACHE_BLOCK_TOKENS = 128
_MOST_CACHE_BYTES = 1 << 30


def check_sizes(config: DecoderConfig, tensor: int, head_sizes: list[int]) -> None:
    """Raise ValueError for sizes that the kernels can't compute, or can't reload weights for."""
    sizes = {mixer.head_size for mixer in config.mixers if isinstance(mixer, AttentionConfig)}
    if lacking := sorted(sizes.difference(head_sizes)):
        raise ValueError(
            f"the model's head size is {lacking[0]}, but vLLM's attention on CPU has {head_sizes} only; set "
            "rollout.engine to native"
        )
    if config.moe is None:
        return
    if config.moe.bias:
        raise ValueError(
            f"vLLM on CPU keeps a {config.model_type}'s experts as they were loaded first, whatever weights come "
            "later; set rollout.engine to native"
        )
    width = config.moe.intermediate_size
    if width % (tensor * _EXPERT_WIDTH_MULTIPLE):
        raise ValueError(
            f"an expert is {width} wide and cut in {tensor}, but vLLM on CPU takes new weights only for multiples of "
            f"{_EXPERT_WIDTH_MULTIPLE} per rank; set rollout.engine to native"
        )


def default_cache_bytes(config: DecoderConfig, position_bytes: int, max_running_rows: int) -> int:
    """Return a KV cache for as many whole rows as run at once, within 1 GiB; for one whole row at least."""
    row_blocks = -(-config.max_positions // _CACHE_BLOCK_TOKENS)
    row_bytes = row_blocks * _CACHE_BLOCK_TOKENS * position_bytes
    return max(row_bytes, min(max_running_rows * row_bytes, _MOST_CACHE_BYTES))


def first_expert_weights(model: nn.Module) -> Tensor | None:
    """Return a copy of one layer's expert weights as the kernel reads them; None in a dense model."""
    layer = next(_layers_of_experts(model), None)
    return None if layer is None else layer.w13_weight.detach().clone()


def pack_again(model: nn.Module, *, experts: bool) -> None:
    """Repack weights after `reload_weights`: the head always, harmless if it isn't tied; `experts` on request.

    Packed experts must not be packed twice.
    """
    layer: Any
    for layer in model.modules():
        # By name, as only vllm_engine.py imports vllm.
        if type(layer).__name__ == "ParallelLMHead":
            layer.quant_method.process_weights_after_loading(layer)
    if experts:
        for layer in _layers_of_experts(model):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _layers_of_experts(model: nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if hasattr(layer, "w13_weight"))
