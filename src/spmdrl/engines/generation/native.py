"""The native engine: the trainer's own decoder over a paged KV cache, in this process.

Each step admits waiting groups, runs their prompts packed in one forward (each prompt once, whatever the size of its
group), then decodes one token of every running row in one more forward. The ranks of a replica do so in lockstep: they
take the same requests, and every rank has all logits and draws the same tokens.

Shape letters: `B` rows, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from spmdrl.engines.generation.choices import ChoiceRecorder, RowChoices
from spmdrl.engines.generation.forward import CachedDecoder, pack_prompts
from spmdrl.engines.generation.lockstep import Lockstep
from spmdrl.engines.generation.paged import BlockPool
from spmdrl.engines.generation.protocol import Request, Response, RolloutConfig
from spmdrl.engines.generation.sampling import RowSampling, draw
from spmdrl.engines.generation.scheduler import Admission, Group, Row, Scheduler
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.parallel.axis_collectives import max_across
from spmdrl.resources.mesh import GenerationMesh, lone_generation_mesh
from spmdrl.types import WeightSlice, whole_slice

# Bounds the activations of one prompt forward; a longer prompt runs alone.
_MAX_PROMPT_TOKENS = 8192


class NativeEngine:
    """Continuous batching on one replica's ranks; a `GenerationEngine`.

    Its ranks submit the same requests, and step together; so do the replicas that share experts.
    """

    wants_iterator: ClassVar[bool] = False

    def __init__(
        self,
        config: DecoderConfig,
        rollout: RolloutConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        mesh: GenerationMesh | None = None,
        recorder: ChoiceRecorder | None = None,
    ):
        """Without a mesh the rank has whole weights.

        With a recorder, which only sparse models can have, responses bring the experts that their tokens went to.
        """
        if rollout.engine_kwargs:
            raise ValueError(
                f"rollout.engine_kwargs has {sorted(rollout.engine_kwargs)}, but the native engine takes none; "
                "empty it or set rollout.engine to vllm"
            )
        if config.head != "vocab":
            raise ValueError("the model has a value head, which says no tokens; set model.path to a language model")
        self.version = 0
        self._config = config
        self._rollout = rollout
        self._device = device
        self._mesh = lone_generation_mesh() if mesh is None else mesh
        self._lockstep = Lockstep(self._mesh.expert, device)
        self._forward = CachedDecoder(
            config, self._mesh, device, dtype, block_size=rollout.block_size, recorder=recorder
        )
        self._cache = self._forward.cache
        self._weights = self._forward.weights
        self._pool = BlockPool()
        self._scheduler = self._new_scheduler()
        self._others_work = False

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

    @property
    def has_work(self) -> bool:
        return bool(self.num_unfinished) or self._others_work

    @property
    def _cache_grows(self) -> bool:
        """Whether the cache holds what the submitted rows need; an accelerator's is taken whole, while it is free."""
        return self._rollout.kv_cache_gib is None and self._device.type == "cpu"

    def submit(self, requests: Sequence[Request]) -> None:
        self._require_awake("take requests")
        for request in requests:
            self._check_positions(request)
        if self._cache_grows:
            self._grow_cache(self._scheduler.blocks_wanted(requests))
        self._scheduler.submit(requests)
        self._note_work()

    @torch.inference_mode()
    def step(self) -> list[Response]:
        self._require_awake("generate")
        responses = self._start_rows(self._scheduler.admit())
        if self._scheduler.running or not self._lockstep.is_alone:
            responses += self._decode()
        self._note_work()
        return responses

    def abort(self) -> list[Response]:
        responses = self._scheduler.abort()
        self._note_work()
        return responses

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._forward.parts.shapes)

    def weight_slices(self) -> dict[str, WeightSlice]:
        return dict(self._forward.parts.slices)

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        return self._weights.wake(names)

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._weights.borrow(weights)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own, shapes = self.wake_weights(), self.weight_shapes()
        missing = set(own)
        for name, tensor in weights:
            if name not in own or tensor.shape != shapes[name]:
                raise ValueError(f"weight {name} of shape {tuple(tensor.shape)} isn't one of this model's")
            part = self._forward.parts.slices[name]
            own[name].copy_(tensor[part.index_within(whole_slice(name, tensor.shape))])
            missing.discard(name)
        if missing:
            raise ValueError(f"{len(missing)} of {len(own)} weights weren't given, such as {min(missing)}")

    def wake_cache(self) -> None:
        if not self._weights.are_awake:
            raise RuntimeError("the KV cache can't wake before the weights, which take their memory first")
        if self._cache.num_blocks:
            return
        num_blocks = 1 if self._cache_grows else self._affordable_blocks()
        self._cache.resize(num_blocks)
        self._pool = BlockPool(num_blocks)
        self._scheduler = self._new_scheduler()

    def sleep(self) -> None:
        if self.num_unfinished:
            raise RuntimeError(f"{self.num_unfinished} rows are unfinished; step until they end, or abort them first")
        self._cache.resize(0)
        self._weights.sleep()

    def memory_bytes(self) -> dict[str, int]:
        return {"generation_weights": self._weights.num_bytes, "kv_cache": self._cache.num_bytes}

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._pool, self._rollout.block_size, self._rollout.max_running_rows)

    def _require_awake(self, action: str) -> None:
        if not (self._weights.are_awake and self._cache.num_blocks):
            raise RuntimeError(f"a sleeping engine can't {action}; call wake_weights, fill them, then wake_cache")

    def _check_positions(self, request: Request) -> None:
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_tokens
        if num_prompt + num_new > self._config.max_positions:
            raise ValueError(
                f"row {request.rows[0]} has {num_prompt} prompt + at most {num_new} new tokens = "
                f"{num_prompt + num_new}, but the model was made for {self._config.max_positions} positions; "
                "lower data.max_prompt_length or rollout.max_completion_length"
            )

    def _affordable_blocks(self) -> int:
        """Blocks that the configured size, or the configured share of the device's memory, has room for."""
        gib, share = self._rollout.kv_cache_gib, self._rollout.gpu_memory_utilization
        if gib is not None:
            budget_bytes, source = gib * 2**30, f"rollout.kv_cache_gib {gib}"
        else:
            backend = torch.get_device_module(self._device)
            backend.empty_cache()
            free_bytes, total_bytes = backend.mem_get_info(self._device)
            budget_bytes = share * total_bytes - (total_bytes - free_bytes)
            source = f"rollout.gpu_memory_utilization {share} of {total_bytes} bytes, of which {free_bytes} are free,"
        # As many on each rank of a replica, whose schedulers decide alike.
        budget = torch.tensor(int(budget_bytes // self._cache.shape.block_bytes), device=self._device)
        num_blocks = -int(max_across(-budget, self._mesh.tensor))
        if num_blocks < 2:
            raise ValueError(
                f"{source} leaves {int(budget_bytes)} bytes for the KV cache, but 2 blocks take "
                f"{2 * self._cache.shape.block_bytes}; raise it or lower rollout.block_size"
            )
        return num_blocks

    def _grow_cache(self, num_blocks: int) -> None:
        if num_blocks > self._cache.num_blocks:
            # By a quarter at least: growing copies, and requests may come one at a time.
            num_blocks = max(num_blocks, self._cache.num_blocks * 5 // 4)
            self._cache.resize(num_blocks)
            self._pool.grow(num_blocks)

    def _note_work(self) -> None:
        """Find out whether replicas that share experts have rows to step for. Collective over them."""
        self._others_work = self._lockstep.most(self.num_unfinished) != [0]

    def _start_rows(self, admissions: list[Admission]) -> list[Response]:
        """Run the prompts of new groups and draw the first token of each admitted row."""
        responses = []
        self._run_prompts([admission.group for admission in admissions if admission.runs_prompt])
        for admission in admissions:
            logits_V = admission.group.prompt_logits_V
            assert logits_V is not None, f"the prompt of rows {admission.group.request.rows} was never run"
            if admission.group.prompt_choices_TLC is not None:
                for row in admission.rows:
                    row.choices = RowChoices(admission.group.prompt_choices_TLC)
            responses += self._draw(admission.rows, logits_V.expand(len(admission.rows), -1))
        return responses

    def _run_prompts(self, groups: list[Group]) -> None:
        """Run these prompts, and as many empty forwards as replicas that share experts run more."""
        packs = pack_prompts(groups, _MAX_PROMPT_TOKENS)
        (num_packs,) = self._lockstep.most(len(packs))
        for pack in [*packs, *[[]] * (num_packs - len(packs))]:
            self._forward.run_prompts(pack)

    def _decode(self) -> list[Response]:
        """Feed the newest token of every running row and draw the next."""
        copies = self._scheduler.make_room()
        if copies.sources:
            self._cache.copy_blocks(copies.sources, copies.targets)
        rows = list(self._scheduler.running.values())
        logits_BV = self._forward.decode(rows)
        return self._draw(rows, logits_BV) if rows else []

    def _draw(self, rows: list[Row], logits_BV: Tensor) -> list[Response]:
        """Draw one token of each row; returns the rows that it ended."""
        sampling = RowSampling.of_rows([row.seed for row in rows], [row.request.sampling for row in rows], self._device)
        drawn = draw(logits_BV, self._tensor([row.length for row in rows]), sampling)
        if not drawn.logprobs_B.isfinite().all():
            raise RuntimeError(f"the logits of policy version {self.version} aren't finite; its weights are broken")
        responses = []
        for row, token, logprob in zip(rows, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
            if row.finish:
                self._scheduler.finish(row)
                responses.append(row.response(row.finish))
        return responses

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)
