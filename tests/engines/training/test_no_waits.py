"""The host never waits for a device between a batch's micro-batches: it queues them all, then reads what came out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engines.training.tiny import make_engine, make_rows, weighted_nll

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, out = func._overloadpacket.__name__, func(*args, **kwargs)
        if name in PRODUCTS:
            self.between += self._since_product or Counter()
            self._since_product = Counter()
        elif waits(name, args, kwargs, out):
            self.all[name] += 1
            if self._since_product is not None:
                self._since_product[name] += 1
        return out


def waits(name: str, args: Any, kwargs: Any, out: Any) -> bool:
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if name in ("_to_copy", "copy_"):
        target, source = (out, inputs[0]) if name == "_to_copy" else inputs[:2]
        crosses = {target.device.type, source.device.type} > {"cpu"}
        is_asynchronous = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        return crosses and not (is_asynchronous and source.is_pinned())
    if not any(tensor.device.type != "cpu" for tensor in inputs):
        return False
    # An index of booleans is one of positions that the device has to count first.
    indexes_by_mask = name in ("index", "index_put_", "index_put") and any(x.dtype == torch.bool for x in inputs[1:])
    return name in READS or indexes_by_mask


@pytest.fixture
def device_world(world: Any) -> Any:
    if world.device.is_cpu:
        pytest.skip("a CPU has nothing to wait for; --device sim shows it anywhere")
    return world


@pytest.mark.on_device
def test_scores_are_read_once_all_are_computed(device_world):
    engine = make_engine(device_world, max_tokens=13)
    engine.score(make_rows())
    with HostWaits() as host:
        engine.score(make_rows())
    assert not host.between


@pytest.mark.on_device
def test_an_update_reads_nothing_before_its_last_product(device_world):
    engine = make_engine(device_world, max_tokens=13)
    engine.update(make_rows(), weighted_nll)
    with HostWaits() as host:
        engine.accumulate(make_rows(), weighted_nll)
    assert not host.between


def test_a_step_reads_as_often_after_many_microbatches_as_after_one(device_world):
    reads = []
    for max_tokens in (1, 10_000):
        engine = make_engine(device_world, max_tokens=max_tokens)
        accumulated = engine.accumulate(make_rows(), weighted_nll)
        with HostWaits() as host:
            engine.step(accumulated)
        reads.append(host.all)
    assert reads[0] == reads[1] and reads[0].total()
