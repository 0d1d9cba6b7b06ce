"""The native engine: the trainer's own decoder over a paged KV cache, in this process.

Each step admits waiting groups, runs their prompts packed in one forward (each prompt once, whatever the size of its
group), then decodes one token of every running row in one more forward.

Shape letters: `G` prompts, `B` rows, `T` packed tokens, `V` vocabulary, `D` model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.generation.attention import DecodeAttention, PromptAttention
from spmdrl.engines.generation.choices import ChoiceRecorder, RowChoices
from spmdrl.engines.generation.paged import SCRATCH_BLOCK, BlockPool, CacheShape, PagedCache
from spmdrl.engines.generation.protocol import Request, Response, RolloutConfig
from spmdrl.engines.generation.sampling import RowSampling, draw
from spmdrl.engines.generation.scheduler import Admission, Group, Row, Scheduler
from spmdrl.engines.generation.weights import FreeableWeights
from spmdrl.engines.models.decoder import Decoder, DecoderConfig

# A CPU matrix product gives each of its rows the same bits whatever their number, from 4 rows on.
_LEAST_ROWS = 4
# Bounds the activations of one prompt forward; a longer prompt runs alone.
_MAX_PROMPT_TOKENS = 8192


class NativeEngine:
    """Continuous batching on one device, with whole weights; a `GenerationEngine`."""

    wants_iterator: ClassVar[bool] = False

    def __init__(
        self,
        config: DecoderConfig,
        rollout: RolloutConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        recorder: ChoiceRecorder | None = None,
    ):
        """With a recorder, which only sparse models can have, responses bring the experts that their tokens went to."""
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
        self._recorder = recorder
        self._device = device
        with torch.device("meta"):
            self._decoder = Decoder(config)
        self._weights = FreeableWeights(self._decoder, device, dtype)
        shape = CacheShape(
            num_layers=config.num_layers,
            block_size=rollout.block_size,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            value_head_size=config.value_head_size,
            dtype=dtype,
        )
        self._cache = PagedCache(shape, device)
        self._pool = BlockPool()
        self._scheduler = self._new_scheduler()

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

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

    @torch.inference_mode()
    def step(self) -> list[Response]:
        self._require_awake("generate")
        responses = self._start_rows(self._scheduler.admit())
        if self._scheduler.running:
            responses += self._decode()
        return responses

    def abort(self) -> list[Response]:
        return self._scheduler.abort()

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._weights.shapes)

    def wake_weights(self) -> dict[str, Tensor]:
        return self._weights.wake()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self.wake_weights()
        missing = set(own)
        for name, tensor in weights:
            if name not in own or tensor.shape != own[name].shape:
                raise ValueError(f"weight {name} of shape {tuple(tensor.shape)} isn't one of this model's")
            own[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(f"{len(missing)} of {len(own)} weights weren't given, such as {min(missing)}")

    def wake_cache(self) -> None:
        if not self._weights.num_bytes:
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
        if not (self._weights.num_bytes and self._cache.num_blocks):
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
        num_blocks = int(budget_bytes // self._cache.shape.block_bytes)
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
        """Fill the blocks of these groups' prompts and leave their last logits in the groups."""
        for pack in pack_prompts(groups, _MAX_PROMPT_TOKENS):
            for group, logits_V in zip(pack, self._prompt_logits(pack), strict=True):
                group.prompt_logits_V = logits_V
            if self._recorder is not None:
                taken_TLC = self._recorder.take()
                for group in pack:
                    length = len(group.request.prompt_ids)
                    # Cloned, because a view would keep the choices of the whole pack.
                    group.prompt_choices_TLC, taken_TLC = taken_TLC[:length].clone(), taken_TLC[length:]

    def _prompt_logits(self, groups: list[Group]) -> Tensor:
        """Logits [G, V] of the last position of each prompt."""
        size = self._rollout.block_size
        tokens = [token for group in groups for token in group.request.prompt_ids]
        lengths = [len(group.request.prompt_ids) for group in groups]
        positions = [position for length in lengths for position in range(length)]
        places = [
            group.prompt_blocks[position // size] * size + position % size
            for group, length in zip(groups, lengths, strict=True)
            for position in range(length)
        ]
        last = [sum(lengths[: index + 1]) - 1 for index in range(len(lengths))]
        lacking = max(_LEAST_ROWS - len(tokens), 0)
        if lacking:
            tokens, positions = tokens + [0] * lacking, positions + list(range(lacking))
            places, lengths = places + [SCRATCH_BLOCK * size] * lacking, [*lengths, lacking]
        offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
        attend = PromptAttention(self._cache, self._tensor(places), offsets)
        last_G = self._tensor(last + [last[-1]] * (_LEAST_ROWS - len(last)))
        logits_GV: Tensor = self._decoder(
            self._tensor(tokens),
            self._tensor(positions),
            attend,
            lambda hidden_TD, head_VD: F.linear(hidden_TD[last_G], head_VD),
            self._recorder,
        )
        return logits_GV[: len(groups)].float()

    def _decode(self) -> list[Response]:
        """Feed the newest token of every running row and draw the next."""
        copies = self._scheduler.make_room()
        if copies.sources:
            self._cache.copy_blocks(copies.sources, copies.targets)
        rows = list(self._scheduler.running.values())
        lacking = max(_LEAST_ROWS - len(rows), 0)
        lengths = [row.length for row in rows] + [1] * lacking
        tables = [row.table for row in rows] + [[SCRATCH_BLOCK]] * lacking
        logits_BV = self._decoder(
            self._tensor([row.token_ids[-1] for row in rows] + [0] * lacking),
            self._tensor(lengths) - 1,
            DecodeAttention(self._cache, tables, lengths),
            F.linear,
            self._recorder,
        )
        if self._recorder is not None:
            # Unbound tokens are views: a step's choices live until its last row ends.
            for row, token_LC in zip(rows, self._recorder.take(), strict=False):
                assert row.choices is not None, f"row {row.row} runs without its prompt's choices"
                row.choices.feed(token_LC)
        return self._draw(rows, logits_BV[: len(rows)].float())

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


def pack_prompts(groups: list[Group], max_tokens: int) -> list[list[Group]]:
    """Split groups, in order, into packs whose prompts hold at most `max_tokens`; a longer prompt is a pack alone."""
    packs: list[list[Group]] = []
    num_tokens = 0
    for group in groups:
        num_tokens += len(group.request.prompt_ids)
        if not packs or num_tokens > max_tokens:
            packs.append([])
            num_tokens = len(group.request.prompt_ids)
        packs[-1].append(group)
    return packs
