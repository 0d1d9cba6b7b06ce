"""One rank's part of a decoder over its part of the paged KV cache: the forwards of the native engine.

Under tensor parallelism a rank has some of the heads, columns and tokens of the vocabulary, and all logits in the end;
with experts spread over ranks, tokens go to them and come back.

Shape letters: `G` prompts, `B` rows, `T` packed tokens, `V` vocabulary, `D` model width, `S` ranks of the tensor axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.generation.attention import DecodeAttention, PromptAttention
from spmdrl.engines.generation.choices import ChoiceRecorder
from spmdrl.engines.generation.paged import SCRATCH_BLOCK, CacheShape, PagedCache
from spmdrl.engines.generation.scheduler import Group, Row
from spmdrl.engines.generation.weights import FreeableWeights
from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.parallel.axis_collectives import gather_rows
from spmdrl.engines.parallel.expert_parallel import apply_expert_parallel
from spmdrl.engines.parallel.parts import Parts
from spmdrl.engines.parallel.tensor_parallel import apply_tensor_parallel
from spmdrl.engines.parallel.vocabulary import VocabularyPart
from spmdrl.resources.mesh import GenerationMesh

# A CPU matrix product gives each of its rows the same bits whatever their number, from 4 rows on.
_LEAST_ROWS = 4


class CachedDecoder:
    """A decoder's part on this rank, its weights and its cache; both are asleep at first.

    Collective over the ranks of the mesh's axes: they run the same forwards in the same order.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mesh: GenerationMesh,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block_size: int,
        recorder: ChoiceRecorder | None,
    ):
        with torch.device("meta"):
            decoder = Decoder(config)
        self.parts = Parts.of(decoder)
        spreads = mesh.layout.expert > 1
        if spreads:
            apply_expert_parallel(decoder, mesh.expert, self.parts, column=mesh.tensor)
        apply_tensor_parallel(decoder, mesh.tensor, self.parts, shares_tokens=False, cuts_experts=not spreads)
        self.weights = FreeableWeights(decoder, device, dtype)
        shape = CacheShape(
            num_layers=config.num_layers,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads // min(config.num_kv_heads, mesh.tensor.size),
            head_size=config.head_size,
            value_head_size=config.value_head_size,
            dtype=dtype,
        )
        self.cache = PagedCache(shape, device)
        self._decoder = decoder
        self._device = device
        self._recorder = recorder
        self._vocabulary = VocabularyPart.of(config.vocab_size, mesh.tensor)

    def run_prompts(self, groups: Sequence[Group]) -> None:
        """Fill the blocks of these groups' prompts and leave their last logits in the groups; none still runs."""
        logits_GV = self._prompt_logits(groups)
        for group, logits_V in zip(groups, logits_GV, strict=True):
            group.prompt_logits_V = logits_V
        if self._recorder is not None:
            taken_TLC = self._recorder.take()
            for group in groups:
                length = len(group.request.prompt_ids)
                # Cloned, because a view would keep the choices of the whole pack.
                group.prompt_choices_TLC, taken_TLC = taken_TLC[:length].clone(), taken_TLC[length:]

    def decode(self, rows: Sequence[Row]) -> Tensor:
        """Feed the newest token of every row and return the logits [B, V] of the next, float32; none still runs."""
        lacking = max(_LEAST_ROWS - len(rows), 0)
        lengths = [row.length for row in rows] + [1] * lacking
        tables = [row.table for row in rows] + [[SCRATCH_BLOCK]] * lacking
        logits_BV = self._decoder(
            self._tensor([row.token_ids[-1] for row in rows] + [0] * lacking),
            self._tensor(lengths) - 1,
            DecodeAttention(self.cache, tables, lengths),
            self._logits,
            self._recorder,
        )
        if self._recorder is not None:
            # Unbound tokens are views: a step's choices live until its last row ends.
            for row, token_LC in zip(rows, self._recorder.take(), strict=False):
                assert row.choices is not None, f"row {row.row} runs without its prompt's choices"
                row.choices.feed(token_LC)
        return logits_BV[: len(rows)].float()

    def _prompt_logits(self, groups: Sequence[Group]) -> Tensor:
        """Logits [G, V] of the last position of each prompt."""
        size = self.cache.shape.block_size
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
        last_G = self._tensor(last + [0] * (_LEAST_ROWS - len(last)))
        logits_GV: Tensor = self._decoder(
            self._tensor(tokens),
            self._tensor(positions),
            PromptAttention(self.cache, self._tensor(places), offsets),
            lambda hidden_TD, head_VD: self._logits(hidden_TD[last_G], head_VD),
            self._recorder,
        )
        return logits_GV[: len(groups)].float()

    def _logits(self, hidden_BD: Tensor, head_VD: Tensor) -> Tensor:
        """All logits [B, V], the same bits on every rank of the tensor axis."""
        vocabulary = self._vocabulary
        logits_BV = F.linear(hidden_BD, head_VD)
        if vocabulary.axis.size == 1:
            return logits_BV
        padded_BV = F.pad(logits_BV, (0, vocabulary.widest - logits_BV.shape[1]))
        parts_SBV = gather_rows(padded_BV, vocabulary.axis).unflatten(0, (vocabulary.axis.size, -1))
        return parts_SBV.transpose(0, 1).flatten(1)[:, : vocabulary.size]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)


def pack_prompts(groups: Sequence[Group], max_tokens: int) -> list[list[Group]]:
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
