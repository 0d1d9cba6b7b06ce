"""The decoding step of one rank as a single compiled graph (torch.compile), for steps bound by many small operations.

Three things stay outside the graph, as operations that it calls: attention over the paged cache, products with packed
weights, and the router and experts of a sparse layer, whose sizes depend on the tokens. All else is fused. The graph is
compiled on first use, for any number of rows, and serves all weights to come.

Shape letters: `B` rows, `H` query heads, `J` key and value heads, `K` head size of queries and keys, `U` head size of
values, `D` and `O` inputs and outputs of a product, `D` also model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.models.layers import Attend
from spmdrl.engines.models.moe import Route, SparseFeedForward
from spmdrl.resources.mesh import GenerationLayout


@dataclass(frozen=True)
class _Outside:
    """What the graph that runs now calls."""

    attend: Attend
    multiply: Callable[[int, Tensor], Tensor]
    feed_experts: Callable[[int, Tensor], Tensor]


_running: list[_Outside] = []


def _attend(q_BHK: Tensor, k_BJK: Tensor, v_BJU: Tensor, layer: int) -> Tensor:
    return _running[-1].attend(layer, q_BHK, k_BJK, v_BJU).contiguous()


def _attend_shape(q_BHK: Tensor, k_BJK: Tensor, v_BJU: Tensor, layer: int) -> Tensor:
    return q_BHK.new_empty(*q_BHK.shape[:2], v_BJU.shape[2])


def _multiply(rows_BD: Tensor, product: int, width: int) -> Tensor:
    return _running[-1].multiply(product, rows_BD)


def _multiply_shape(rows_BD: Tensor, product: int, width: int) -> Tensor:
    # Not len(rows_BD), which would tie the graph to their number.
    return rows_BD.new_empty(rows_BD.shape[0], width)


def _feed_experts(hidden_BD: Tensor, layer: int) -> Tensor:
    return _running[-1].feed_experts(layer, hidden_BD)


def _feed_experts_shape(hidden_BD: Tensor, layer: int) -> Tensor:
    return hidden_BD.new_empty(hidden_BD.shape)


_LIBRARY = torch.library.Library("spmdrl", "DEF")
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, int layer) -> Tensor")
_LIBRARY.define("multiply(Tensor rows, int product, int width) -> Tensor")
_LIBRARY.define("feed_experts(Tensor hidden, int layer) -> Tensor")
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
_LIBRARY.impl("attend", _attend_shape, "Meta")
_LIBRARY.impl("multiply", _multiply, "CompositeExplicitAutograd")
_LIBRARY.impl("multiply", _multiply_shape, "Meta")
_LIBRARY.impl("feed_experts", _feed_experts, "CompositeExplicitAutograd")
_LIBRARY.impl("feed_experts", _feed_experts_shape, "Meta")


def multiply_outside(rows_BD: Tensor, product: int, width: int) -> Tensor:
    """Call product number `product` [B, O] from within a graph that is being compiled."""
    return torch.ops.spmdrl.multiply(rows_BD, product, width)


class CompiledStep:
    """A decoder's step, compiled; used in inference mode, always in the same one of its weights' two layouts."""

    def __init__(self, decoder: Decoder, logits: Callable[[Tensor], Tensor], products: Sequence[Callable[..., Tensor]]):
        """`logits` is the head, of hidden states; `products` are what `multiply_outside` calls by number."""

        def step(tokens_B: Tensor, positions_B: Tensor) -> Tensor:
            return decoder(tokens_B, positions_B, _attend_outside, lambda hidden_BD, _: logits(hidden_BD))

        self._products = products
        self._experts = {module.layer: _put_outside(module) for module in _sparse_layers(decoder)}
        self._step = torch.compile(
            _with_own_code(step), dynamic=True, fullgraph=True, options={"guard_filter_fn": _guards_kept}
        )

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, attend: Attend, route: Route | None) -> Tensor:
        """Logits [B, V] of the rows' next tokens; `route` sees what routers find, as in a step without a graph."""
        for values_B in (tokens_B, positions_B):
            # So that a graph tied to this number of rows is an error when it is made, rather than a wrong one later.
            torch._dynamo.mark_dynamic(values_B, 0)
        outside = _Outside(
            attend,
            lambda product, rows_BD: self._products[product](rows_BD),
            lambda layer, hidden_BD: self._experts[layer](hidden_BD, route),
        )
        _running.append(outside)
        try:
            return self._step(tokens_B, positions_B)
        finally:
            _running.pop()


def check_compiles(layout: GenerationLayout) -> None:
    """Raise ValueError, with a way out, where ranks can't have their steps as graphs."""
    if layout.tensor > 1:
        raise ValueError(
            f"rollout.compile is true, but resources.generation.tensor is {layout.tensor}, and a graph holds no "
            "collectives; set rollout.compile to false, or resources.generation.tensor to 1, which leaves "
            "resources.generation.expert to spread a sparse model"
        )


def check_compiler(device: torch.device) -> None:
    """Raise ValueError if this machine lacks what graphs are compiled by: a C++ compiler for a CPU, Triton for CUDA."""
    if device.type == "cuda" and find_spec("triton") is None:
        raise ValueError(
            "rollout.compile is true, but Triton isn't installed, which PyTorch's builds for CUDA bring along; "
            "pip install triton, or set rollout.compile to false"
        )
    if device.type != "cpu":
        return
    # Imported here because they take a second.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "rollout.compile is true, but no C++ compiler was found: install g++, name one in the environment's CXX, "
            "or set rollout.compile to false"
        ) from error


def _attend_outside(layer: int, q_BHK: Tensor, k_BJK: Tensor, v_BJU: Tensor) -> Tensor:
    return torch.ops.spmdrl.attend(q_BHK, k_BJK, v_BJU, layer)


def _sparse_layers(decoder: Decoder) -> list[SparseFeedForward]:
    return [module for module in decoder.modules() if isinstance(module, SparseFeedForward)]


def _put_outside(module: SparseFeedForward) -> Callable[[Tensor, Route | None], Tensor]:
    """Have a graph of the layer call its experts; returns what runs them. Prefills go on as before."""
    run, layer = module.routed, module.layer

    def routed(hidden_BD: Tensor, route: Route | None) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.spmdrl.feed_experts(hidden_BD, layer)
        return run(hidden_BD, route)

    module.routed = routed
    return run


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as another code object, which keys compiled graphs: engines share none."""
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )


def _guards_kept(guards: Sequence[Any]) -> list[bool]:
    """Check sizes only: an engine's modules don't change, and checking them takes longer than what the graph saves."""
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]
