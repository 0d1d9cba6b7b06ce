"""vLLM as a generation engine, inside this process: the one file that imports vllm.

Every rank runs an engine under the job's own launcher (`external_launcher`) and in the existing process group. Ranks of
a tensor group schedule the same requests identically; other ranks are independent.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from spmdrl.engines.generation import vllm_cpu
from spmdrl.engines.generation.native.running_rows import Row, rows_of
from spmdrl.engines.generation.protocol import Decode, Request, Response, all_weights, completes_stop_string
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import parameter_shapes, read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from spmdrl.runtime.launch import TORCHRUN_VARIABLES, read_launch_environment


class VllmEngine:
    """This rank's vLLM engine; a `GenerationEngine`. `step` is collective over the tensor group."""

    wants_iterator: ClassVar[bool] = True

    def __init__(
        self, model_folder: Path, rollout: RolloutConfig, device: torch.device, dtype: torch.dtype, *,
        tensor: int = 1, decode: Decode | None = None, ids_without_token: Sequence[int] = (),
    ):  # fmt: skip
        """Load the model of `model_folder`, cut over `tensor` consecutive ranks, then sleep. Collective over the world.

        Stop strings need `decode`. Raises ValueError for models or settings that vLLM can't run here.
        """
        self.version = 0
        self._config = read_config(model_folder)
        self._files = open_weights(model_folder, self._config)
        self._dtype = dtype
        self._tensor = tensor
        self._position_bytes = _position_bytes(self._config, tensor, dtype)
        self._decode_text = decode
        self._on_cpu = device.type == "cpu"
        # Shorter than a list of allowed ids; speculative decoding can't use it.
        bars = bool(ids_without_token) and "speculative_config" not in rollout.engine_kwargs
        self._logit_bias = dict.fromkeys(ids_without_token, -math.inf) if bars else None
        self._logprobs_mode = logprobs_mode(rollout, bars_ids=bars)
        self._rows: dict[int, Row] = {}
        self._weights_awake = self._cache_awake = True
        # Set before the import, here as vllm is an extra: no process beside this one, no usage report, a quiet screen.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm.sampling_params

        self._vllm = vllm
        if self._on_cpu:
            _prepare_cpu(self._config, tensor)
        with _launch_variables():
            self._llm = vllm.LLM(**(self._arguments(model_folder, rollout) | rollout.engine_kwargs))
        _detach(self._llm)
        self._packs_experts = self._on_cpu and _reload_leaves_experts(self._llm)
        self.sleep()

    @property
    def num_unfinished(self) -> int:
        return len(self._rows)

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def submit(self, requests: Sequence[Request]) -> None:
        self._require_awake()
        for request in requests:
            if request.sampling.stop_strings and self._decode_text is None:
                raise ValueError(
                    f"rows {list(request.rows)} have stop strings; build the engine with a decode function"
                )
            for row in rows_of(request):
                if row.row in self._rows:
                    raise ValueError(f"row {row.row} is submitted twice; wait for its response or abort it first")
                prompt = self._vllm.TokensPrompt(prompt_token_ids=[*request.prompt_ids, *row.token_ids])
                # One request per row, because each has its own seed; the prefix cache shares the prompt.
                self._llm.llm_engine.add_request(str(row.row), prompt, self._sampling(row))
                self._rows[row.row] = row

    def step(self) -> list[Response]:
        self._require_awake()
        responses: list[Response] = []
        for output in self._llm.llm_engine.step() if self._rows else ():
            row, completion = int(output.request_id), output.outputs[0]
            exact = gives_unfiltered(self._logprobs_mode, self._rows[row].request.sampling)
            _note(self._rows[row], completion, self.version, exact=exact)
            if output.finished:
                responses.append(self._rows.pop(row).response(completion.finish_reason))
            elif _is_stopped(self._rows[row], self._decode_text):
                self._llm.llm_engine.abort_request([str(row)])
                responses.append(self._rows.pop(row).response("stop"))
        return responses

    def abort(self) -> list[Response]:
        if self._rows:
            self._llm.llm_engine.abort_request([str(row) for row in self._rows])
        aborted, self._rows = self._rows, {}
        return [row.response("aborted") for row in aborted.values()]

    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        self._require_awake()
        self._require_idle()
        # vLLM scores prompts beside generating, unscaled in any mode, and without its prefix cache.
        sampling = self._vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [self._vllm.TokensPrompt(prompt_token_ids=list(row)) for row in rows]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [logprobs_of_prompt(row, output.prompt_logprobs) for row, output in zip(rows, outputs, strict=True)]

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
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

    def keep_weights(self, names: Iterable[str]) -> None:
        raise RuntimeError("vLLM takes all weights anew each time; leave them to load_weights")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._require_idle()
        source = {"weights_iterator": self._files.as_stored(all_weights(weights, self.weight_shapes()))}
        self._llm.collective_rpc("reload_weights", kwargs=source)
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
        self._require_idle()
        if not self._weights_awake:
            return
        if not self._on_cpu:
            # Level 2: the next step's weights replace these, so nothing is kept on the host.
            self._llm.sleep(level=2)
        self._weights_awake = self._cache_awake = False

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes of this rank's weights and KV cache by their sizes; on CPU always, as vLLM can't sleep there."""
        num_weights = sum(math.prod(shape) for shape in self.weight_shapes().values())
        weight_bytes = num_weights // self._tensor * self._dtype.itemsize
        return {
            "generation_weights": weight_bytes * (self._weights_awake or self._on_cpu),
            "kv_cache": self._cache_bytes * (self._cache_awake or self._on_cpu),
        }

    def cache_bytes_for(self, *, num_groups: int, group_size: int, num_tokens: int) -> int:
        """Return the fixed size, set when vLLM started."""
        return self._cache_bytes

    @property
    def _cache_bytes(self) -> int:
        cache = self._llm.llm_engine.vllm_config.cache_config
        return (cache.num_gpu_blocks or 0) * cache.block_size * self._position_bytes

    def _arguments(self, model_folder: Path, rollout: RolloutConfig) -> dict[str, Any]:
        """Return vLLM's constructor arguments, except the user's own."""
        arguments: dict[str, Any] = {
            "model": str(model_folder),
            "dtype": str(self._dtype).removeprefix("torch."),
            "tensor_parallel_size": self._tensor,
            "distributed_executor_backend": "external_launcher",
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "max_num_seqs": rollout.max_running_rows,
            "enable_sleep_mode": not self._on_cpu,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            "logprobs_mode": self._logprobs_mode,
        }
        cache_bytes = None if rollout.kv_cache_gib is None else int(rollout.kv_cache_gib * 2**30)
        if self._on_cpu:
            rows = rollout.max_running_rows
            cache_bytes = cache_bytes or vllm_cpu.default_cache_bytes(self._config, self._position_bytes, rows)
            # Compiling takes longer than the small models of a CPU run need.
            arguments["enforce_eager"] = True
        if rollout.cuda_graphs is False:
            arguments["enforce_eager"] = True
        if cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = cache_bytes
        return arguments

    def _require_awake(self) -> None:
        if not self._cache_awake:
            raise RuntimeError("a sleeping engine can't generate; call wake_weights, load_weights, then wake_cache")

    def _require_idle(self) -> None:
        if self._rows:
            raise RuntimeError(f"{len(self._rows)} rows are unfinished; step until they end, or abort them first")

    def _sampling(self, row: Row) -> Any:
        """Return vLLM's parameters; random numbers restart with each request, so a continued row gets another seed."""
        sampling, num_given = row.request.sampling, len(row.token_ids)
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens - num_given,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logit_bias=self._logit_bias,
            seed=(row.seed + num_given) % (1 << 63),
            logprobs=0,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )


@contextlib.contextmanager
def _launch_variables() -> Iterator[None]:
    """Set the launcher's variables: vLLM needs two also in a job without a launcher, and rewrites others."""
    launch = read_launch_environment(os.environ)
    kept = {name: os.environ.get(name) for name in TORCHRUN_VARIABLES}
    os.environ.update({"RANK": str(launch.rank), "LOCAL_RANK": str(launch.device_index)})
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _position_bytes(config: DecoderConfig, num_ranks: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token in one rank's KV cache, divided over this many ranks."""
    if config.latent is not None:
        # Every rank caches the vector that all heads share.
        size = config.num_layers * (config.latent.key_value_rank + config.latent.rotary_size)
    else:
        states = [mixer.state(num_ranks) for mixer in config.mixers]
        return sum(state.block_bytes(1, dtype) for state in states if not state.kind.is_slot)
    return size * dtype.itemsize


def _reload_leaves_experts(llm: Any) -> bool:
    """Return True if a reload doesn't repack experts: then a reload of the model's own files changes them."""
    [before] = llm.apply_model(vllm_cpu.first_expert_weights)
    if before is None:
        return False
    llm.collective_rpc("reload_weights")
    [after] = llm.apply_model(vllm_cpu.first_expert_weights)
    return not torch.equal(before, after)


def _detach(llm: Any) -> None:
    """Undo patches that would outlive the engine or break the job's own process group."""
    from vllm.distributed.parallel_state import get_tp_group

    # Its shared memory has a name, so a killed job would leave it behind; here it isn't used.
    get_tp_group().mq_broadcaster = None
    # A dropped engine would destroy the job's process group, too; versions without this leave the group alone.
    if finalizer := getattr(llm.llm_engine.engine_core, "_finalizer", None):
        finalizer.detach()
    # vLLM exempts all existing objects from collection, so a dropped engine would stay in memory.
    gc.unfreeze()


def _prepare_cpu(config: DecoderConfig, num_ranks: int) -> None:
    from vllm.distributed import parallel_state
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    vllm_cpu.check_sizes(config, num_ranks, CPUAttentionBackend.get_supported_head_sizes())
    # Ranks that name their group differently use torch.distributed. The alternative is shared memory of a fixed name,
    # which two jobs on a host would confuse, and which a job leaves behind.
    parallel_state._group_name_counter["tp"] = read_launch_environment(os.environ).rank


def _note(row: Row, completion: Any, version: int, *, exact: bool) -> None:
    """Append the tokens of one output, which holds those of its step alone."""
    for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        row.token_ids.append(token)
        # No number is better than one of another distribution.
        row.logprobs.append(candidates[token].logprob if exact else math.nan)
        row.versions.append(version)


def _is_stopped(row: Row, decode: Decode | None) -> bool:
    """Return True if the newest token completes a stop string, which vLLM, without a tokenizer, can't see."""
    strings = row.request.sampling.stop_strings
    return bool(strings) and decode is not None and completes_stop_string(row.token_ids, strings, decode)


# vLLM accepts neither more log-prob modes nor a mode per request: the whole engine has one of these two.
_FILTERED, _UNSCALED = "processed_logprobs", "raw_logprobs"


def logprobs_mode(rollout: RolloutConfig, *, bars_ids: bool = False) -> str:
    """Return vLLM's mode in which training rollouts get log-probs scaled by the temperature but not filtered.

    With barred ids, prefer the mode that counts them in, if the temperature admits it: their share is tiny. Raises
    ValueError for filters at a temperature other than 1: vLLM's modes scale and filter, or do neither.
    """
    sampling = rollout.sampling(())
    for mode in (_UNSCALED, _FILTERED) if bars_ids else (_FILTERED, _UNSCALED):
        if gives_unfiltered(mode, sampling):
            return mode
    raise ValueError(
        f"rollout.temperature is {rollout.temperature} with rollout.top_p {rollout.top_p}, top_k {rollout.top_k}, "
        f"min_p {rollout.min_p}: vLLM has no log-probs that are scaled but not filtered; set the temperature to 1, "
        "turn the filters off, or set rollout.engine to native"
    )


def gives_unfiltered(mode: str, sampling: SamplingParams) -> bool:
    """Return True if vLLM's log-probs in this mode are scaled by the temperature and not filtered."""
    if mode == _UNSCALED:
        return sampling.temperature in (0, 1)
    return sampling.temperature == 0 or (sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0)


def logprobs_of_prompt(token_ids: Sequence[int], candidates: Sequence[Mapping[int, Any] | None]) -> Tensor:
    """Return log-probs of a prompt's tokens but the first, picked from vLLM's candidates by position."""
    logprobs = [by_token[token].logprob for token, by_token in zip(token_ids, candidates, strict=True) if by_token]
    assert len(logprobs) == len(token_ids) - 1, f"vLLM rated {len(logprobs)} tokens of a prompt of {len(token_ids)}"
    return torch.tensor(logprobs, dtype=torch.float32)
