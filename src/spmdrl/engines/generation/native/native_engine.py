"""The native engine: the trainer's own decoder over a paged KV cache, in this process.

Each step admits waiting groups and runs the next chunks of their prompts, packed in one forward (once per prompt,
whatever the size of its group), then decodes one token of every running row in another forward. The ranks of a replica
do so in lockstep: they take the same requests, and every rank has all logits and draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from spmdrl.engines.generation.native.fixed_step import FixedStep
from spmdrl.engines.generation.native.forward import CachedDecoder
from spmdrl.engines.generation.native.graph_steps import wants_graphs
from spmdrl.engines.generation.native.paged import affordable_bytes
from spmdrl.engines.generation.native.row_memory import blocks_within, bytes_of
from spmdrl.engines.generation.native.row_steps import Lockstep, RowSteps
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder, check_request
from spmdrl.engines.generation.native.sampling import RowDrawer
from spmdrl.engines.generation.native.scheduler import planned_blocks
from spmdrl.engines.generation.native.step_pipeline import StepPipeline
from spmdrl.engines.generation.protocol import Decode, Request, Response, all_weights
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.mesh import GenerationMesh, lone_generation_mesh


class NativeEngine:
    """Continuous batching on one replica's ranks; a `GenerationEngine`.

    Its ranks submit the same requests and step together; so do replicas that share experts.
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
        decode: Decode | None = None,
        ids_without_token: Sequence[int] = (),
    ):
        """Without a mesh the rank has whole weights.

        With a recorder, which only sparse models can have, responses include their tokens' experts. Stop strings need
        `decode`, the text of tokens; ids without a token are never drawn.
        """
        if rollout.engine_kwargs:
            raise ValueError(
                f"rollout.engine_kwargs has {sorted(rollout.engine_kwargs)}, but the native engine takes none; "
                "empty it or set rollout.engine to vllm"
            )
        if config.head != "vocab":
            raise ValueError("the model has a value head and can't generate; set model.path to a language model")
        self._config = config
        self._rollout = rollout
        self._device = device
        self._mesh = lone_generation_mesh() if mesh is None else mesh
        self._lockstep = Lockstep(self._mesh.expert, device)
        self._forward = CachedDecoder(config, self._mesh, device, dtype, rollout, recorder)
        self._cache = self._forward.cache
        self._weights = self._forward.weights
        self._drawer = RowDrawer(device, decode, ids_without_token)
        self._pipeline: StepPipeline | None = None
        if wants_graphs(rollout, config, self._mesh.layout, device):
            step = FixedStep(
                self._forward.step_logits, self._cache, device, rollout.max_running_rows, self._drawer.never
            )
            self._pipeline = StepPipeline(step, device, self._drawer, rollout.max_running_rows)
        # A recorder must see every fed token, so none may come from shared prefixes.
        self._steps = RowSteps(
            self._forward, self._drawer, self._pipeline, self._lockstep, rollout, shares_prefixes=recorder is None
        )
        self._most_blocks: list[int] = []
        self._others_work = False

    @property
    def version(self) -> int:
        return self._steps.version

    @version.setter
    def version(self, version: int) -> None:
        self._steps.version = version
        self._steps.scheduler.forget_prefixes()

    @property
    def num_unfinished(self) -> int:
        return self._steps.scheduler.num_unfinished

    @property
    def has_work(self) -> bool:
        return bool(self.num_unfinished) or self._others_work

    @property
    def _cache_grows(self) -> bool:
        """True if the cache grows with the submitted rows; an accelerator's is allocated whole."""
        return self._rollout.kv_cache_gib is None and self._device.type == "cpu"

    def submit(self, requests: Sequence[Request]) -> None:
        self._require_awake("take requests")
        for request in requests:
            check_request(request, max_positions=self._config.max_positions, reads_text=self._drawer.reads_text)
        if self._cache_grows:
            self._steps.grow(self._steps.scheduler.blocks_wanted(requests), most=self._most_blocks)
        self._steps.scheduler.submit(requests)
        self._note_work()

    @torch.inference_mode()
    def step(self) -> list[Response]:
        self._require_awake("generate")
        faultpoint("generate")
        responses = self._steps.step()
        self._note_work()
        return responses

    def abort(self) -> list[Response]:
        responses = self._steps.abort()
        self._note_work()
        return responses

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        self._require_awake("score rows")
        return self._forward.score(rows)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._forward.parts.shapes)

    def weight_slices(self) -> dict[str, WeightSlice]:
        return dict(self._forward.parts.slices)

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        # The caller may change the weights.
        self._steps.forget_weights()
        return self._weights.wake(names)

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._steps.forget_weights()
        self._weights.borrow(weights)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self.wake_weights()
        for name, tensor in all_weights(weights, self.weight_shapes()):
            part = self._forward.parts.slices[name]
            own[name].copy_(tensor[part.index_within(whole_slice(name, tensor.shape))])

    def keep_weights(self, names: Iterable[str]) -> None:
        self._weights.keep(names)

    def wake_cache(self) -> None:
        if not self._weights.are_awake:
            raise RuntimeError("the KV cache can't wake before the weights, which take their memory first")
        if any(self._cache.num_blocks):
            return
        budget = affordable_bytes(self._rollout, self._device, self._mesh.tensor)
        self._most_blocks = blocks_within(budget, self._cache.block_bytes, self._rollout)
        self._steps.open([1] * len(self._most_blocks) if self._cache_grows else self._most_blocks)

    def sleep(self) -> None:
        if self.num_unfinished:
            raise RuntimeError(f"{self.num_unfinished} rows are unfinished; step until they end, or abort them first")
        self._steps.close()
        self._weights.sleep()
        self._drawer.forget()

    def cache_bytes_for(self, *, num_groups: int, group_size: int, num_tokens: int) -> int:
        sizes = self._cache.block_bytes
        blocks = planned_blocks(
            sizes, self._rollout, num_groups=num_groups, group_size=group_size, num_tokens=num_tokens
        )
        return bytes_of(blocks, sizes)

    def memory_bytes(self) -> dict[str, int]:
        held = {"generation_weights": self._weights.num_bytes, "kv_cache": self._cache.num_bytes}
        return held if self._pipeline is None else held | {"decode_graphs": self._pipeline.num_bytes}

    def _require_awake(self, action: str) -> None:
        if not (self._weights.are_awake and any(self._cache.num_blocks)):
            raise RuntimeError(f"a sleeping engine can't {action}; call wake_weights, fill them, then wake_cache")
        if self._steps.is_mid_step:
            raise RuntimeError(f"the engine can't {action}: its last step failed; abort gives back what it was doing")

    def _note_work(self) -> None:
        """Check if replicas that share experts have rows to step for. Collective over them."""
        self._others_work = self._lockstep.most(self.num_unfinished) != [0]
