"""vLLM as a generation engine, inside this process: the one file that imports vllm.

Every rank runs an engine under the job's own launcher (`external_launcher`) and in the process group that is there.
Ranks of a tensor group schedule the same requests alike; other ranks know nothing of each other.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from spmdrl.engines.generation import vllm_cpu
from spmdrl.engines.generation.protocol import Finish, Request, Response, RolloutConfig, SamplingParams
from spmdrl.engines.models.hf import parameter_shapes, read_config
from spmdrl.engines.models.stacked import unstack
from spmdrl.resources.launch import read_launch_environment
from spmdrl.types import WeightSlice, whole_slice

# vLLM accepts neither more log-prob modes nor a mode per request: the whole engine has one of these two.
_FILTERED, _UNSCALED = "processed_logprobs", "raw_logprobs"


@dataclass
class _Row:
    """A row that vLLM works on, with what it gave so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class VllmEngine:
    """This rank's vLLM engine; a `GenerationEngine`. `step` is collective over the tensor group."""

    wants_iterator: ClassVar[bool] = True

    def __init__(
        self, model_folder: Path, rollout: RolloutConfig, device: torch.device, dtype: torch.dtype, *, tensor: int = 1
    ):
        """Load the model from `model_folder`, cut over `tensor` consecutive ranks, then sleep. Collective over all ranks.

        Raises ValueError for what vLLM can't compute here.
        """
        self.version = 0
        self._config = read_config(model_folder)
        self._dtype = dtype
        self._tensor = tensor
        self._on_cpu = device.type == "cpu"
        self._logprobs_mode = logprobs_mode(rollout)
        self._rows: dict[int, _Row] = {}
        self._weights_awake = self._cache_awake = False
        # Set before the import, which is here as vllm is an extra: the engine core stays in this process, nothing is
        # reported to vLLM's makers, and the screen is the job's.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm.sampling_params

        self._vllm = vllm
        arguments: dict[str, Any] = {
            "model": str(model_folder),
            "dtype": str(dtype).removeprefix("torch."),
            "tensor_parallel_size": tensor,
            "distributed_executor_backend": "external_launcher",
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "max_num_seqs": rollout.max_running_rows,
            "enable_sleep_mode": not self._on_cpu,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            "logprobs_mode": self._logprobs_mode,
        }
        if rollout.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
        elif self._on_cpu:
            arguments["kv_cache_memory_bytes"] = vllm_cpu.default_cache_bytes(
                self._config, self._position_bytes, rollout.max_running_rows
            )
        if self._on_cpu:
            vllm_cpu.check_sizes(self._config, tensor, _head_sizes_on_cpu())
            # Compiling takes longer than the small models of a CPU run need.
            arguments["enforce_eager"] = True
        with _launch_variables():
            self._llm = vllm.LLM(**(arguments | rollout.engine_kwargs))
        # An engine that is dropped would take the job's process group with it.
        self._llm.llm_engine.engine_core._finalizer.detach()
        self._packs_experts = self._on_cpu and self._reload_leaves_experts()
        self._discard()

    @property
    def num_unfinished(self) -> int:
        return len(self._rows)

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def submit(self, requests: Sequence[Request]) -> None:
        self._require_awake()
        for request in requests:
            for row, seed in zip(request.rows, request.seeds, strict=True):
                if row in self._rows:
                    raise ValueError(f"row {row} is submitted twice; wait for its response or abort it first")
                prompt = self._vllm.TokensPrompt(prompt_token_ids=list(request.prompt_ids))
                # One request a row, because each has its own seed; the prefix cache shares the prompt.
                self._llm.llm_engine.add_request(str(row), prompt, self._sampling(request.sampling, seed))
                self._rows[row] = _Row(request)

    def step(self) -> list[Response]:
        self._require_awake()
        if not self._rows:
            return []
        responses = []
        for output in self._llm.llm_engine.step():
            row, completion = int(output.request_id), output.outputs[0]
            self._note(self._rows[row], completion)
            if output.finished:
                responses.append(self._response(row, completion.finish_reason))
        return responses

    def abort(self) -> list[Response]:
        if self._rows:
            self._llm.llm_engine.abort_request([str(row) for row in self._rows])
        return [self._response(row, "aborted") for row in list(self._rows)]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self._config)

    def weight_slices(self) -> dict[str, WeightSlice]:
        return {name: whole_slice(name, shape) for name, shape in self.weight_shapes().items()}

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Wake all weights, whichever are named: vLLM has them in one pool."""
        if not self._on_cpu and not self._weights_awake:
            self._llm.wake_up(tags=["weights"])
        self._weights_awake = True
        return {}

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        raise RuntimeError("vLLM takes its weights one after another; give them to load_weights")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._rows:
            raise RuntimeError(f"{len(self._rows)} rows are unfinished; step until they end, or abort them first")
        self._reload(weights_iterator=unstack(_complete(weights, self.weight_shapes())))
        if self._on_cpu:
            self._llm.apply_model(lambda model: vllm_cpu.pack_again(model, experts=self._packs_experts))
        # Cached prefixes were computed with the old weights.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which the old weights computed")

    def wake_cache(self) -> None:
        if not self._weights_awake:
            raise RuntimeError("the KV cache can't wake before the weights, which take their memory first")
        if not self._on_cpu and not self._cache_awake:
            self._llm.wake_up(tags=["kv_cache"])
        self._cache_awake = True

    def sleep(self) -> None:
        if self._rows:
            raise RuntimeError(f"{len(self._rows)} rows are unfinished; step until they end, or abort them first")
        if self._weights_awake:
            self._discard()

    def memory_bytes(self) -> dict[str, int]:
        """What this rank's weights and KV cache take by their sizes: vLLM doesn't tell them apart."""
        num_weights = sum(math.prod(shape) for shape in self.weight_shapes().values())
        cache = self._llm.llm_engine.vllm_config.cache_config
        cache_bytes = (cache.num_gpu_blocks or 0) * cache.block_size * self._position_bytes
        return {
            "generation_weights": num_weights // self._tensor * self._dtype.itemsize * self._holds(self._weights_awake),
            "kv_cache": cache_bytes * self._holds(self._cache_awake),
        }

    @property
    def _position_bytes(self) -> int:
        """What one token takes in this rank's KV cache."""
        config = self._config
        if config.latent is not None:
            # Every rank caches the vector that all heads share.
            size = config.latent.key_value_rank + config.latent.rotary_size
        else:
            size = max(1, config.num_kv_heads // self._tensor) * (config.head_size + config.value_head_size)
        return config.num_layers * size * self._dtype.itemsize

    def _holds(self, awake: bool) -> bool:
        """Whether memory is held: a CPU's always is, as vLLM's sleep does nothing there."""
        return awake or self._on_cpu

    def _reload(self, **source: Any) -> None:
        self._llm.collective_rpc("reload_weights", kwargs=source)

    def _reload_leaves_experts(self) -> bool:
        """Whether experts aren't packed by a reload: then those of the model's own files differ from before it."""
        [before] = self._llm.apply_model(vllm_cpu.first_expert_weights)
        if before is None:
            return False
        self._reload()
        [after] = self._llm.apply_model(vllm_cpu.first_expert_weights)
        return not torch.equal(before, after)

    def _discard(self) -> None:
        """Drop weights and cache: the next step's weights replace them, so nothing is kept on the host (level 2)."""
        if not self._on_cpu:
            self._llm.sleep(level=2)
        self._weights_awake = self._cache_awake = False

    def _require_awake(self) -> None:
        if not self._cache_awake:
            raise RuntimeError("a sleeping engine can't generate; call wake_weights, load_weights, then wake_cache")

    def _sampling(self, sampling: SamplingParams, seed: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            seed=seed,
            logprobs=0,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.CUMULATIVE,
        )

    def _note(self, row: _Row, completion: Any) -> None:
        """Take over the tokens that are new in a cumulative output."""
        new = slice(len(row.token_ids), len(completion.token_ids))
        exact = gives_unfiltered(self._logprobs_mode, row.request.sampling)
        for token, candidates in zip(completion.token_ids[new], completion.logprobs[new], strict=True):
            row.token_ids.append(token)
            # Better no number than one of another distribution.
            row.logprobs.append(candidates[token].logprob if exact else math.nan)
            row.versions.append(self.version)

    def _response(self, row: int, finish: Finish) -> Response:
        done = self._rows.pop(row)
        return Response(row, tuple(done.token_ids), tuple(done.logprobs), finish, tuple(done.versions))


def _complete(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights as they come. Raises ValueError for one that isn't the model's, and at the end for one not given."""
    missing = set(shapes)
    for name, weight in weights:
        if tuple(weight.shape) != shapes.get(name):
            raise ValueError(f"weight {name} of shape {tuple(weight.shape)} isn't one of this model's")
        missing.discard(name)
        yield name, weight
    if missing:
        raise ValueError(f"{len(missing)} of {len(shapes)} weights weren't given, such as {min(missing)}")


@contextlib.contextmanager
def _launch_variables() -> Iterator[None]:
    """Tell vLLM who this process is where the launcher left that open: a job of one rank needs no launcher."""
    launch = read_launch_environment(os.environ)
    told = {"RANK": str(launch.rank), "LOCAL_RANK": str(launch.local_rank)}
    lacking = {name: value for name, value in told.items() if name not in os.environ}
    os.environ.update(lacking)
    try:
        yield
    finally:
        for name in lacking:
            del os.environ[name]


def _head_sizes_on_cpu() -> list[int]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend.get_supported_head_sizes()


def logprobs_mode(rollout: RolloutConfig) -> str:
    """vLLM's mode in which training rollouts get log-probs scaled by the temperature but not filtered.

    Raises ValueError for filters at a temperature other than 1: vLLM's modes scale and filter, or do neither.
    """
    sampling = rollout.sampling(())
    for mode in (_FILTERED, _UNSCALED):
        if gives_unfiltered(mode, sampling):
            return mode
    raise ValueError(
        f"rollout.temperature is {rollout.temperature} with rollout.top_p {rollout.top_p}, top_k {rollout.top_k}, "
        f"min_p {rollout.min_p}: vLLM can't tell log-probs that are scaled but not filtered; set the temperature to 1, "
        "turn the filters off, or set rollout.engine to native"
    )


def gives_unfiltered(mode: str, sampling: SamplingParams) -> bool:
    """Whether vLLM's log-probs in this mode are those of the distribution scaled by the temperature, not filtered."""
    if mode == _UNSCALED:
        return sampling.temperature in (0, 1)
    return sampling.temperature == 0 or (sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0)
