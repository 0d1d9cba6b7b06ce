"""One rank's part of a decoder over its part of the paged KV cache: the forwards of the native engine.

Under tensor parallelism a rank has some of the heads, columns and tokens of the vocabulary, and all logits in the end;
with experts spread over ranks, tokens go to them and come back.

Shape letters: `G` groups, `B` rows, `T` packed tokens, `V` vocabulary, `D` model width, `S` ranks of the tensor axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.generation.attention import DecodeAttention
from spmdrl.engines.generation.choices import ChoiceRecorder
from spmdrl.engines.generation.paged import SCRATCH_BLOCK, CacheShape, PagedCache
from spmdrl.engines.generation.prefill_attention import PrefillAttention, Span
from spmdrl.engines.generation.rows import Chunk, Row
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

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Fill the blocks of these chunks and leave the last logits in the groups that they end; none still runs."""
        logits_GV = self._chunk_logits(chunks)
        for chunk, logits_V in zip([chunk for chunk in chunks if chunk.is_last], logits_GV, strict=True):
            chunk.group.logits_V = logits_V
        if self._recorder is not None:
            taken_TLC = self._recorder.take()
            for chunk in chunks:
                # Cloned, because a view would keep the choices of the whole pack.
                chunk.group.choices.append(taken_TLC[: chunk.num_tokens].clone())
                taken_TLC = taken_TLC[chunk.num_tokens :]

    def decode(self, rows: Sequence[Row]) -> Tensor:
        """Feed the newest token of every row and return the logits [B, V] of the next, float32; none still runs."""
        # A multiple, because a CPU's silu rounds elements that don't fill a whole vector otherwise than the rest.
        lacking = -len(rows) % _LEAST_ROWS if rows else _LEAST_ROWS
        # Sorted, because attention takes rows of similar length together.
        order = sorted(range(len(rows)), key=lambda index: rows[index].length)
        fed = [rows[index] for index in order]
        lengths = [1] * lacking + [row.length for row in fed]
        tables = [[SCRATCH_BLOCK]] * lacking + [row.table for row in fed]
        logits_BV = self._decoder(
            self._tensor([0] * lacking + [row.token_ids[-1] for row in fed]),
            self._tensor(lengths) - 1,
            DecodeAttention(self.cache, tables, lengths),
            self._logits,
            self._recorder,
        )
        if self._recorder is not None:
            # Unbound tokens are views: a step's choices live until its last row ends.
            for row, token_LC in zip(fed, self._recorder.take()[lacking:], strict=True):
                assert row.choices is not None, f"row {row.row} runs without its prompt's choices"
                row.choices.feed(token_LC)
        fed_B = torch.tensor(order, dtype=torch.int64, device=self._device)
        return logits_BV[lacking + fed_B.argsort()].float()

    def _chunk_logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [G, V] of the last position of each group that ends with its chunk."""
        tokens = [token for chunk in chunks for token in chunk.group.token_ids[chunk.start : chunk.stop]]
        spans = [Span(chunk.group.table, chunk.start, chunk.stop) for chunk in chunks]
        lacking = max(_LEAST_ROWS - len(tokens), 0)
        if lacking:
            tokens, spans = tokens + [0] * lacking, [*spans, Span([SCRATCH_BLOCK] * lacking, 0, lacking)]
        stops = itertools.accumulate(chunk.num_tokens for chunk in chunks)
        last = [stop - 1 for chunk, stop in zip(chunks, stops, strict=True) if chunk.is_last]
        last_G = self._tensor(last + [0] * (_LEAST_ROWS - len(last)))
        logits_GV: Tensor = self._decoder(
            self._tensor(tokens),
            self._tensor([position for span in spans for position in range(span.start, span.stop)]),
            PrefillAttention(self.cache, spans),
            lambda hidden_TD, head_VD: self._logits(hidden_TD[last_G], head_VD),
            self._recorder,
        )
        return logits_GV[: len(last)].float()

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
