"""What runs on a fake CUDA device, trace by trace; `python -m tests.accelerators.cuda_traces` prints them as JSON.

Each trace runs code of the product as a GPU would get it, and checks what comes out by shape, dtype and device. The
numbers themselves need a device, or the CPU's own tests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from spmdrl.dataflow.stages.critic_states import ValueLoss
from spmdrl.dataflow.stages.update import PolicyLoss
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.engines.training.context.ring_attention import RingAttention
from spmdrl.engines.training.heads import LogprobHead, ValueHead
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.roles import Rating
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.device import Device
from spmdrl.resources.layout import GenerationLayout, UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import Axis, build_generation_mesh, build_update_mesh
from spmdrl.resources.world import open_world
from tests.accelerators.fake_cuda import FakeCuda, fake_cuda
from tests.accelerators.kernel_traces import DTYPES, FLASH, Trace, assert_like, kernels, short
from tests.accelerators.published_models import PUBLISHED
from tests.accelerators.sharding_traces import sharded_update
from tests.accelerators.step_traces import captured_step, pages_of_shapes
from tests.accelerators.training_inputs import LENGTHS, losses, policy_rows, rows_of
from tests.engines.generation.support import request, run
from tests.engines.training.tiny import axis_of
from tests.support.tuned import TunedRollout


def models() -> Iterator[tuple[str, Trace]]:
    """Every family, forward and backward to each weight."""
    for family, dtype in itertools.product(PUBLISHED, DTYPES):
        config = PUBLISHED[family] if dtype == torch.bfloat16 else _smaller(PUBLISHED[family])
        yield f"{family}, {short(dtype)}", partial(differentiate, config=config, dtype=dtype)


def engines() -> Iterator[tuple[str, Trace]]:
    """The training engine as a policy, critic, reference and reward model, and the native generation engine."""
    for name, loss in losses().items():
        yield f"update, {name}", partial(update, config=_smaller(PUBLISHED["qwen2"]), loss=loss)
    yield "update, sparse layers", partial(update, config=_smaller(PUBLISHED["deepseek_v3"]))
    yield "critic", value_head
    yield "reward model", reward_model
    for family in ("qwen2", "deepseek_v3"):
        yield f"frozen {family}, bfloat16", partial(score, config=PUBLISHED[family])
    for family in ("qwen2", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "gemma4_text"):
        yield f"generation, {family}, bfloat16", partial(generate, config=PUBLISHED[family], dtype=torch.bfloat16)
    for family, config in PUBLISHED.items():
        if config.moe is None and config.window is None and config.delta is None:
            yield f"captured step, {family}, bfloat16", partial(captured_step, config=config)
    yield "generation, qwen2, float32", partial(generate, config=_smaller(PUBLISHED["qwen2"]), dtype=torch.float32)


def layouts() -> Iterator[tuple[str, Trace]]:
    """The first of two ranks: its part of the weights or tokens, and what it sends."""
    for family in ("qwen2", "deepseek_v3"):
        yield f"tensor 2, frozen {family}, bfloat16", partial(score_in_parts, config=PUBLISHED[family])
    yield "tensor 2, gradients, qwen2, float32", partial(accumulate_in_parts, config=_smaller(PUBLISHED["qwen2"]))
    yield (
        "tensor 2, generation, qwen2, bfloat16",
        partial(generate, config=PUBLISHED["qwen2"], dtype=torch.bfloat16, tensor=2),
    )
    for dtype in DTYPES:
        yield f"context 2, ring attention, {short(dtype)}", partial(attend_in_ring, dtype=dtype)


def sharding() -> Iterator[tuple[str, Trace]]:
    """The first of four ranks under FSDP2, with float32 shards."""
    made = partial(sharded_update, rows=policy_rows(), loss=losses()["grpo"])
    for layout in (UpdateLayout(shard=4), UpdateLayout(data=2, shard=2)):
        name = f"data {layout.data}, shard {layout.shard}" if layout.data > 1 else f"shard {layout.shard}"
        for family in ("llama", "qwen2"):
            yield f"{name}, update, {family}, bfloat16", partial(made, config=PUBLISHED[family], layout=layout)


GROUPS = {"kernels": kernels, "models": models, "engines": engines, "layouts": layouts, "sharding": sharding}
NUM_RANKS = {"layouts": 2, "sharding": 4}
"""Ranks of the group, where the first of several is traced."""


def _smaller(config: DecoderConfig) -> DecoderConfig:
    """One layer, and few experts where it has any, as in float32 each has a product of its own."""
    if config.moe is None:
        return replace(config, num_layers=1)
    moe = replace(config.moe, num_experts=16, num_groups=1, groups_per_token=1, dense_layers=())
    return replace(config, num_layers=1, moe=moe)


def differentiate(cuda: FakeCuda, *, config: DecoderConfig, dtype: torch.dtype) -> None:
    """Packed rows through the decoder and its head, and back to every weight."""
    cuda.integer = _rows_per_expert(config)
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.to(dtype).to_empty(device=cuda.device)
    tokens_T = torch.zeros(sum(LENGTHS), dtype=torch.int64, device=cuda.device)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS]).to(cuda.device)
    places_P = torch.arange(sum(LENGTHS) - 1, device=cuda.device)
    head = LogprobHead(places_P, tokens_T[1:], softcap=config.logit_softcap)
    logprobs_P, entropy_P = decoder(tokens_T, positions_T, PackedCausalAttention(offsets_of(LENGTHS)), head)
    assert logprobs_P.dtype == entropy_P.dtype == torch.float32
    (logprobs_P + entropy_P).sum().backward()
    for name, weight in decoder.named_parameters():
        if ".indexer." in name:
            continue
        assert weight.grad is not None, name
        assert_like(weight.grad, weight, cuda.device)
    num_fused = cuda.operators[FLASH] + cuda.operators["aten::_flash_attention_forward"]
    assert bool(num_fused) == (dtype == torch.bfloat16), cuda.operators
    # Nothing waits for the device, but where each expert has a product of its own size.
    assert (cuda.host_reads > 0) == (config.moe is not None and dtype == torch.float32), cuda.host_reads


def _rows_per_expert(config: DecoderConfig) -> int:
    return 0 if config.moe is None else sum(LENGTHS) * config.moe.experts_per_token // config.moe.num_experts


def engine_of(
    cuda: FakeCuda, config: DecoderConfig, *, rating: Rating = "logprobs", tensor: int = 1, **options: object
):
    """A training engine whose tensors are the device's; its mesh has but a tensor axis, so that nothing is sharded."""
    device = Device(cuda.device.type)
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(tensor=tensor), tensor), Device("cpu"), 0)
    cuda.integer = _rows_per_expert(config)
    training = TrainingConfig(max_steps=2)
    return TrainingEngine(config, training, OptimConfig(lr=1e-3), mesh, device, rating=rating, **options)


def update(cuda: FakeCuda, *, config: DecoderConfig, loss: PolicyLoss | None = None) -> None:
    """Micro-batches, forward, backward, the agreed norm, clipping and the fused optimizer step."""
    engine = engine_of(cuda, config, compute_dtype=torch.float32)
    result = engine.update(policy_rows(), loss or losses()["grpo"])
    assert not result.skipped and result.num_microbatches == 1
    assert cuda.operators["aten::_fused_adamw_"] == 1, cuda.operators
    for means in engine.optimizer_state().values():
        assert {tensor.device for tensor in means.values()} == {cuda.device}


def score(cuda: FakeCuda, *, config: DecoderConfig) -> None:
    """A reference model, in the dtype that it computes in."""
    engine = engine_of(cuda, config, frozen=True)
    scores = engine.score(rows_of(LENGTHS))
    assert scores.logprobs_R.shape == (sum(LENGTHS) - len(LENGTHS),) and scores.logprobs_R.device == cuda.device
    assert cuda.operators[FLASH] == 2, cuda.operators


def score_in_parts(cuda: FakeCuda, *, config: DecoderConfig) -> None:
    engine = engine_of(cuda, config, frozen=True, tensor=2)
    assert engine.score(rows_of(LENGTHS)).logprobs_R.shape == (sum(LENGTHS) - len(LENGTHS),)
    assert cuda.operators["c10d::_allgather_base_"] and cuda.operators["c10d::_reduce_scatter_base_"]


def accumulate_in_parts(cuda: FakeCuda, *, config: DecoderConfig) -> None:
    """Gradients of a rank's parts, summed where both ranks hold a weight; the agreed norm needs true ranks."""
    engine = engine_of(cuda, config, compute_dtype=torch.float32, tensor=2)
    assert engine.accumulate(policy_rows(), losses()["grpo"]).num_microbatches == 1
    for name, gradient in engine.model.named_gradients().items():
        assert_like(gradient.tensor, engine.named_shards()[name].tensor, cuda.device)
    assert cuda.operators["c10d::allreduce_"], cuda.operators


def attend_in_ring(cuda: FakeCuda, *, dtype: torch.dtype) -> None:
    lengths = [16, 3, 30]
    attend = RingAttention(lengths, Axis("context", 2, 0, None, (0, 1)), cuda.device)
    shapes = [(2 * sum(lengths), num_heads, 128) for num_heads in (8, 2, 2)]
    inputs = [torch.zeros(shape, dtype=dtype, device=cuda.device, requires_grad=True) for shape in shapes]
    out = attend(0, *inputs)
    assert_like(out, inputs[0], cuda.device)
    for gradient, given in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert_like(gradient, given, cuda.device)
    assert cuda.operators["c10d::send"] == cuda.operators["c10d::recv_"] > 0, cuda.operators


def value_head(cuda: FakeCuda) -> None:
    config = PUBLISHED["qwen3"].with_value_head()
    engine = engine_of(cuda, config, rating="token_values", compute_dtype=torch.float32)
    num_response = sum(LENGTHS) - len(LENGTHS)
    rows = rows_of(LENGTHS, values=torch.ones(num_response), returns=torch.ones(num_response))
    assert engine.values(rows).shape == (num_response,)
    engine.update(rows, ValueLoss(num_response, clip=0.2))
    assert cuda.operators["aten::_fused_adamw_"] == 1


def reward_model(cuda: FakeCuda) -> None:
    config = PUBLISHED["llama"].with_value_head()
    engine = engine_of(cuda, config, rating="row_values", frozen=True)
    assert engine.values(rows_of(LENGTHS)).shape == (len(LENGTHS),)
    hidden_TD, weight_1D = (torch.zeros(n, 8, dtype=torch.bfloat16, device=cuda.device) for n in (4, 1))
    (values_P,) = ValueHead(torch.tensor([1, 3], device=cuda.device), axis_of("tensor"))(hidden_TD, weight_1D)
    assert (values_P.shape, values_P.dtype) == ((2,), torch.float32)


def generate(cuda: FakeCuda, *, config: DecoderConfig, dtype: torch.dtype, tensor: int = 1) -> None:
    """Groups, shared prefixes, chunks behind cached ones, blocks copied on write, and every filter of sampling."""
    rollout = TunedRollout(
        block_size=16, max_prefill_tokens=48, kv_cache_gib=0.25, max_running_rows=8, cuda_graphs=False
    )
    mesh = build_generation_mesh(GenerationLayout(tensor=tensor), Device("cpu"), tensor, 0)
    engine = NativeEngine(config, rollout, cuda.device, dtype, mesh=mesh)
    engine.wake_weights()
    # Ranks of a tensor axis agree on the largest of minus their bytes for the cache.
    cuda.integer = -(16 << 20)
    engine.wake_cache()
    cuda.integer = 0
    every = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, max_tokens=3)
    greedy = SamplingParams(temperature=0, max_tokens=3)
    prompts = [tuple(range(40)), tuple(range(70)), (5,)]
    requests = [request(prompt, [2 * i, 2 * i + 1], greedy if i else every) for i, prompt in enumerate(prompts)]
    with pages_of_shapes():
        responses = run(engine, requests)
    assert {len(response.token_ids) for response in responses.values()} == {3} and len(responses) == 6
    assert [len(logprobs) for logprobs in engine.score([[1, 2, 3], [4, 5]])] == [2, 1]


def as_markdown() -> str:
    """The traces by group, as the page on accelerators lists them."""
    lines = []
    for group, of_group in GROUPS.items():
        dtypes: dict[str, list[str]] = {}
        for name, _ in of_group():
            base, _, dtype = name.rpartition(", ")
            in_dtype = dtype in map(short, DTYPES)
            dtypes.setdefault(base if in_dtype else name, []).extend([dtype] if in_dtype else [])
        if dtypes.keys() == PUBLISHED.keys():
            dtypes = {"every family": dtypes["llama"]}
        listed = "; ".join(f"{name} ({', '.join(of)})" if of else name for name, of in dtypes.items())
        lines.append(textwrap.fill(f"- {group}: {listed}.", width=118, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


@contextlib.contextmanager
def _first_of(num_ranks: int) -> Iterator[None]:
    """A process group in which this rank is the first, and nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    failures: dict[str, str | None] = {}
    group = sys.argv[1]
    with _first_of(NUM_RANKS[group]) if group in NUM_RANKS else open_world("cpu"):
        for name, trace in GROUPS[group]():
            try:
                with fake_cuda() as cuda:
                    trace(cuda)
                failures[name] = None
            except Exception:
                failures[name] = traceback.format_exc()
    print(json.dumps(failures), flush=True)
    # Autograd's thread for the device ends a moment after the last backward, and Python's finalization beside it
    # aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main()
