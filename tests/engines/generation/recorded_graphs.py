"""Graphs on a CPU: what a capture ran is run again operation by operation, on the very memory that it had then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.ops import TABLE

Operation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


def run_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU run PyTorch's operations alone: those of its library can't be recorded."""
    monkeypatch.setitem(TABLE["paged_attention"], "cpu", lambda *arguments: plain.paged_attention(*arguments))
    for name in ("rms_norm", "rotate", "swiglu", "conv_step", "gated_delta_step"):
        monkeypatch.setitem(TABLE[name], "cpu", getattr(plain, name))


class RecordedGraph(TorchDispatchMode):
    """Records the operations below it, and replays them into their first results."""

    num_bytes = 1000

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        # Not by the schema: operations such as reshape may or may not copy.
        is_view = all(x.untyped_storage().data_ptr() in given for x in made)
        if not is_view or func._schema.is_mutable:
            self._operations.append((func, args, kwargs, None if is_view else result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, first in self._operations:
            result = func(*args, **kwargs)
            if first is not None:
                tree_map(lambda own, new: own.copy_(new) if isinstance(own, Tensor) else None, first, result)


class RecordingCapture:
    """Counts what it captures; a capture leaves memory as it was, as on a device."""

    made: list[RecordingCapture] = []

    def __init__(self, device: torch.device):
        self.num_captured = self.num_forgotten = 0
        self.made.append(self)

    def forget(self) -> None:
        self.num_forgotten += 1

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        self.num_captured += 1
        with RecordedGraph() as graph:
            run()
        return graph
