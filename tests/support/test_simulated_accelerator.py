"""Each test runs in processes of its own: the device stays in the process that it was registered in."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from spmdrl.resources.world import World
from tests.support import simulated_accelerator
from tests.support.ranks import end, fork, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(simulated_accelerator.why_not() is not None, reason=str(simulated_accelerator.why_not())),
]


def on_device(function: Callable, *args: Any, num_ranks: int = 1) -> list[Any]:
    """Run a function on ranks of simulated devices; the first call may compile."""
    return run_ranks(num_ranks, function, *args, device="sim", timeout=600)


def module(world: World) -> Any:
    return world.device.module


def touch_from_host() -> None:
    simulated_accelerator.install()
    tensor = torch.zeros(4, device="sim")
    # What a CPU kernel would do with the tensor's pointer.
    torch.frombuffer((ctypes.c_char * 16).from_address(tensor.data_ptr()), dtype=torch.float32).sum()


def test_a_process_that_touches_device_memory_faults():
    process = fork(touch_from_host)
    process.join(600)
    assert process.exitcode == -signal.SIGSEGV
    end(process, 0)


def use_memory(world: World) -> dict[str, int]:
    sim = module(world)
    before = sim.memory_allocated()
    first = torch.empty(1 << 20, device="sim")
    second = torch.empty(100, device="sim")
    held = sim.memory_allocated() - before
    del first
    found = {"held": held, "left": sim.memory_allocated() - before, "peak": sim.max_memory_allocated() - before}
    sim.reset_peak_memory_stats()
    free, total = sim.mem_get_info()
    found |= {"new_peak": sim.max_memory_allocated() - before, "used": total - free - before}
    # What nothing has written is no number.
    assert second.isnan().all().item()
    return found


def test_the_allocator_counts_what_is_held():
    (found,) = on_device(use_memory)
    assert found == {"held": (4 << 20) + 512, "left": 512, "peak": (4 << 20) + 512, "new_peak": 512, "used": 512}


def exceed_limit(world: World) -> str:
    module(world).set_memory_limit(1 << 20)
    kept = torch.zeros(1 << 10, device="sim")
    with pytest.raises(torch.OutOfMemoryError) as refused:
        torch.zeros(1 << 20, device="sim")
    assert kept.sum().item() == 0
    torch.zeros(1 << 17, device="sim")
    return str(refused.value)


def test_memory_beyond_the_limit_is_refused():
    (message,) = on_device(exceed_limit)
    assert "out of memory: 4194304 bytes are wanted and 4096 of 1048576 are in use" in message


class Model(nn.Sequential):
    def __init__(self, dtype: torch.dtype):
        layers = [nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.RMSNorm(32)]
        super().__init__(*layers, nn.Linear(32, 32))
        self.to(dtype)


def trained(device: torch.device, dtype: torch.dtype, options: dict[str, bool]) -> list[Tensor]:
    """Weights and loss of a small model after three steps."""
    torch.manual_seed(0)
    model = Model(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    tokens = (torch.arange(64) % 32).view(4, 16).to(device)
    for _ in range(3):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [weight.detach().cpu() for weight in (*model.parameters(), loss)]


def train_on_both(world: World, late_kernels: bool) -> list[str]:
    """The cases in which the device's bits differ from the CPU's."""
    module(world).late_kernels(late_kernels)
    different = []
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"foreach": True}, {"fused": True}):
            on_device, on_cpu = (
                trained(device, dtype, options) for device in (torch.device("sim"), torch.device("cpu"))
            )
            if not all(map(torch.equal, on_device, on_cpu)):
                different.append(f"{dtype} {options}")
    assert (module(world).late_counts()[0] > 0) == late_kernels
    return different


@pytest.mark.parametrize("late_kernels", [False, True])
def test_training_gives_the_bits_of_the_cpu(late_kernels):
    assert on_device(train_on_both, late_kernels) == [[]]


def reduce_and_gather(world: World) -> list[float]:
    own = torch.full((3,), float(world.rank + 1), device=world.device.torch_device)
    dist.all_reduce(own)
    parts = torch.empty(6, device=world.device.torch_device)
    dist.all_gather_into_tensor(parts, own + world.rank)
    on_host = torch.ones(1)
    dist.all_reduce(on_host)
    assert own.device.index == world.rank
    return [*parts.tolist(), on_host.item()]


def test_ranks_communicate_from_devices_and_from_the_host():
    assert on_device(reduce_and_gather, num_ranks=2) == [[3.0, 3.0, 3.0, 4.0, 4.0, 4.0, 2.0]] * 2


def trained_in_shards(world: World, late_kernels: bool) -> tuple[list[Tensor], dict[str, int]]:
    """Whole weights after three sharded steps in bfloat16, and which kernels ran at once where others were late."""
    on_device = world.device.kind == "sim"
    if on_device:
        module(world).late_kernels(late_kernels)
    torch.manual_seed(0)
    model = Model(torch.float32).to(world.device.torch_device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(world.device.kind, (world.size,))
    for part in (model[1], model[-1], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tokens = ((torch.arange(64) + world.rank) % 32).view(4, 16).to(world.device.torch_device)
    for _ in range(3):
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights = [weight.full_tensor().detach().cpu() for weight in model.parameters()]
    return [*weights, loss.detach().cpu()], module(world).late_counts()[1] if on_device else {}


def test_sharded_training_in_bfloat16_gives_the_bits_of_the_cpu():
    expected = run_ranks(2, trained_in_shards, False, device="cpu")
    for late_kernels in (False, True):
        found = on_device(trained_in_shards, late_kernels, num_ranks=2)
        for (ours, at_once), (theirs, _) in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))
            assert set(at_once) == ({"aten::native_layer_norm"} if late_kernels else set())


def stand_for_npu(world: World) -> tuple[str, list[float]]:
    simulated_accelerator.install("npu")
    group = dist.new_group(backend="cpu:gloo,npu:hccl")
    own = torch.full((2,), float(world.rank), device=f"npu:{world.local_rank}")
    dist.all_reduce(own, group=group)
    backend = group._get_backend(torch.device("npu"))
    return backend.name(), own.tolist()


def test_it_stands_for_an_npu_with_hccl():
    assert run_ranks(2, stand_for_npu, device="cpu", timeout=600) == [("hccl", [1.0, 1.0])] * 2


def copy_without_waiting(world: World) -> tuple[float, float, float]:
    sim = module(world)
    sim.check_races(False)
    source = torch.zeros(8, device="sim")
    pinned = torch.full((8,), 7.0).pin_memory()
    assert pinned.is_pinned()
    side = sim.Stream()
    with sim.stream(side):
        source.copy_(pinned, non_blocking=True)
        copied = side.record_event()
    assert sim.num_queued() == 2
    too_early = (source + 0)[0].item()
    sim.current_stream().wait_event(copied)
    after_waiting = (source + 0)[0].item()
    pinned.copy_(source * 2, non_blocking=True)
    return too_early, after_waiting, pinned[0].item()


def test_a_copy_that_nothing_waits_for_has_not_happened():
    (seen,) = on_device(copy_without_waiting)
    assert seen == (0.0, 7.0, 7.0)


def free_while_a_copy_reads(world: World, is_recorded: bool) -> list[str]:
    sim = module(world)
    pinned, side = torch.empty(1000, pin_memory=True), sim.Stream()
    source = torch.ones(1000, device="sim")
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        pinned.copy_(source, non_blocking=True)
    if is_recorded:
        source.record_stream(side)
    del source
    try:
        torch.full((1000,), 2.0, device="sim")
    except RuntimeError as race:
        assert "race" in str(race)
    side.synchronize()
    assert pinned[0].item() == 1.0 or not is_recorded
    return sim.take_races()


def test_memory_is_used_anew_only_behind_the_streams_that_were_recorded():
    assert on_device(free_while_a_copy_reads, True) == [[]]
    ((race,),) = on_device(free_while_a_copy_reads, False)
    assert "aten::fill_ writes" in race and "aten::copy_ (of memory that was freed)" in race


def mix_devices(world: World) -> list[str]:
    here, host = torch.zeros(2, device="sim"), torch.zeros(2)
    generator = torch.Generator().manual_seed(0)
    calls: list[Callable[[], object]] = [
        lambda: here + host,
        lambda: host.add_(here),
        lambda: torch.cat([here, host]),
        lambda: torch.rand(2, device="sim", generator=generator),
        lambda: F.embedding(torch.zeros(1, dtype=torch.int64), here[None]),
        lambda: here + torch.zeros(2, device="sim:1"),
    ]
    messages = []
    for call in calls:
        with pytest.raises(RuntimeError) as refused:
            call()
        messages.append(str(refused.value).splitlines()[0])
    # Numbers and indices may come from the host.
    assert (here + torch.tensor(1.0))[torch.tensor([1])].item() == 1.0
    return messages


def test_tensors_of_the_host_and_of_the_device_do_not_mix():
    (messages,) = on_device(mix_devices)
    assert all("expected" in message for message in messages), messages
