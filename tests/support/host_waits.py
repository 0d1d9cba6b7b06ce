"""Counts at how many operations the host waits for a device."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their results are numbers on the host, or have a size that only the device has.
READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "is_nonzero", "bincount")
PRODUCTS = ("mm", "addmm", "bmm", "_fused_adamw_")


class HostWaits(TorchDispatchMode):
    """Counts the operations at which the host waits for the device: all of them, and those between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Counter[str] = Counter()
        self.all: Counter[str] = Counter()
        self._since_product: Counter[str] | None = None

    def __enter__(self) -> HostWaits:
        # No operators: waits for streams, events and whole devices.
        sys.setprofile(self._notice)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        sys.setprofile(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, out = func._overloadpacket.__name__, func(*args, **kwargs)
        if name in PRODUCTS:
            self.between += self._since_product or Counter()
            self._since_product = Counter()
        elif waits(name, args, kwargs, out):
            self._count(name)
        return out

    def _notice(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == "synchronize":
            self._count("synchronize")

    def _count(self, name: str) -> None:
        self.all[name] += 1
        if self._since_product is not None:
            self._since_product[name] += 1


def waits(name: str, args: Any, kwargs: Any, out: Any) -> bool:
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if name in ("_to_copy", "copy_"):
        target, source = (out, inputs[0]) if name == "_to_copy" else inputs[:2]
        crosses = {target.device.type, source.device.type} > {"cpu"}
        is_asynchronous = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        on_host = target if target.device.type == "cpu" else source
        # Of nothing CUDA pins nothing, and copies nothing.
        return crosses and on_host.numel() > 0 and not (is_asynchronous and on_host.is_pinned())
    if not any(tensor.device.type != "cpu" for tensor in inputs):
        return False
    # An index of booleans is one of positions that the device has to count first.
    indexes_by_mask = name in ("index", "index_put_", "index_put") and any(x.dtype == torch.bool for x in inputs[1:])
    return name in READS or indexes_by_mask
