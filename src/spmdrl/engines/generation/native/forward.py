"""One rank's part of a decoder over its part of the paged KV cache: the forwards of the native engine.

Under tensor parallelism a rank has some of the heads, columns and tokens of the vocabulary, and in the end all logits;
with experts spread over ranks, tokens are sent to them and back.

Shape letters: `B` rows, or groups of them, `T` packed tokens, `V` vocabulary, `D` model width, `A` ranks of the tensor
axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.generation.native.cached_attention import DecodeAttention, PrefillAttention, Span
from spmdrl.engines.generation.native.engine_weights import PackedWeights
from spmdrl.engines.generation.native.paged import SCRATCH_BLOCK, StateCache
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder, Chunk, FedToken
from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.plain import LEAST_ROWS
from spmdrl.engines.models.layers import Mix, PackedCausalAttention
from spmdrl.engines.models.moe import Route
from spmdrl.engines.parallel.axis_collectives import gather_rows
from spmdrl.engines.parallel.expert_parallel import apply_expert_parallel
from spmdrl.engines.parallel.tensor_parallel import apply_tensor_parallel
from spmdrl.engines.parallel.weight_cuts import Parts, VocabularyPart
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.resources.mesh import GenerationMesh

_ROWS_AT_A_TIME = 4


class CachedDecoder:
    """A rank's part of a decoder, its weights and its cache; both start asleep.

    Collective over the ranks of the mesh's axes: they run the same forwards in the same order.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mesh: GenerationMesh,
        device: torch.device,
        dtype: torch.dtype,
        rollout: RolloutConfig,
        recorder: ChoiceRecorder | None,
    ):
        with torch.device("meta"):
            decoder = Decoder(config)
        self.parts = Parts.of(decoder)
        spreads = mesh.layout.expert > 1
        if spreads:
            apply_expert_parallel(decoder, mesh.expert, self.parts, column=mesh.tensor)
        apply_tensor_parallel(decoder, mesh.tensor, self.parts, shares_tokens=False, cuts_experts=not spreads)
        self.weights = PackedWeights(decoder, device, dtype)
        states = [mixer.state(mesh.tensor.size) for mixer in config.mixers]
        self.cache = StateCache(states, rollout.block_size, dtype, device)
        self._decoder = decoder
        self._packs_weights = rollout.pack_weights
        self._device = device
        self._recorder = recorder
        self._vocabulary = VocabularyPart.of(config.vocab_size, mesh.tensor)

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Fill these chunks' blocks and set the logits of groups that end with them; no other chunk may be running."""
        logits_BV = self._chunk_logits(chunks)
        for chunk, logits_V in zip([chunk for chunk in chunks if chunk.is_last], logits_BV, strict=True):
            chunk.group.logits_V = logits_V
        if self._recorder is not None:
            taken_TLC = self._recorder.take()
            for chunk in chunks:
                # Cloned, because a view would keep the choices of the whole pack.
                chunk.group.choices.append(taken_TLC[: chunk.num_tokens].clone())
                taken_TLC = taken_TLC[chunk.num_tokens :]

    def decode(self, fed: Sequence[FedToken]) -> Tensor:
        """Feed tokens, each after its row's earlier ones; returns the next logits [B, V], float32.

        None still runs.
        """
        self._settle_weights()
        # With fewer rows, rounding would differ.
        least_rows = _ROWS_AT_A_TIME if self.weights.are_packed else LEAST_ROWS
        # A multiple, because a CPU's silu rounds elements beyond whole vectors differently.
        lacking = max(-len(fed) % _ROWS_AT_A_TIME, least_rows - len(fed))
        lengths = [1] * lacking + [token.length for token in fed]
        padding = [[SCRATCH_BLOCK] for _ in self.cache.kinds]
        tables = [padding] * lacking + [token.row.tables for token in fed]
        logits_BV = self.step_logits(
            self._tensor([0] * lacking + [token.token for token in fed]),
            self._tensor([length - 1 for length in lengths]),
            DecodeAttention.of_rows(self.cache, tables, lengths),
            self._recorder,
        )
        if self._recorder is not None:
            # Unbound tokens are views: a step's choices live until its last row ends.
            for token, choices_LC in zip(fed, self._recorder.take()[lacking:], strict=True):
                assert token.row.choices is not None, f"row {token.row.row} runs without its prompt's choices"
                token.choices = choices_LC
        return logits_BV[lacking:].float()

    def step_logits(self, tokens_B: Tensor, positions_B: Tensor, attend: Mix, route: Route | None = None) -> Tensor:
        """Return logits [B, V] of a decoding step whose inputs are on the device."""
        self._settle_weights()
        return self._decoder(tokens_B, positions_B, attend, lambda hidden_BD, _: self._logits(hidden_BD), route)

    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return log-probs, float32, of each row's tokens but the first, given those before; no cache is used."""
        tokens = [token for row in rows for token in row]
        padded = [*rows, [0] * max(LEAST_ROWS - len(tokens), 0)]
        offsets = torch.tensor([0, *itertools.accumulate(map(len, padded))])
        logits_TV = self._run(
            [token for row in padded for token in row],
            [position for row in padded for position in range(len(row))],
            PackedCausalAttention(offsets),
            self._logits,
            None,
        ).float()
        following_T1 = self._tensor([*tokens[1:], 0])[:, None]
        # In the same steps as training, as log_softmax rounds differently.
        logits_TV = logits_TV[: len(tokens)] - logits_TV[: len(tokens)].amax(-1, keepdim=True)
        logprobs_T = logits_TV.gather(1, following_T1).squeeze(1) - logits_TV.exp().sum(-1).log()
        return [logprobs[:-1] for logprobs in logprobs_T.split([len(row) for row in rows])]

    def _chunk_logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return logits [B, V] of the last position of each group that ends with its chunk."""
        tokens = [token for chunk in chunks for token in chunk.group.token_ids[chunk.start : chunk.stop]]
        spans = [Span(chunk.group.tables, chunk.start, chunk.stop) for chunk in chunks]
        lacking = max(LEAST_ROWS - len(tokens), 0)
        if lacking:
            tokens += [0] * lacking
            spans.append(Span([[SCRATCH_BLOCK] * lacking for _ in self.cache.kinds], 0, lacking))
        stops = itertools.accumulate(chunk.num_tokens for chunk in chunks)
        last = [stop - 1 for chunk, stop in zip(chunks, stops, strict=True) if chunk.is_last]
        last_B = self._tensor(last + [0] * (LEAST_ROWS - len(last)))
        logits_BV = self._run(
            tokens,
            [position for span in spans for position in range(span.start, span.stop)],
            PrefillAttention(self.cache, spans),
            lambda hidden_TD: self._logits(hidden_TD[last_B]),
            self._recorder,
        )
        return logits_BV[: len(last)].float()

    def _run(
        self,
        tokens: list[int],
        positions: list[int],
        attend: Mix,
        head: Callable[[Tensor], Tensor],
        route: Route | None,
    ) -> Tensor:
        self._settle_weights()
        return self._decoder(
            self._tensor(tokens), self._tensor(positions), attend, lambda hidden_TD, _: head(hidden_TD), route
        )

    def _settle_weights(self) -> None:
        if self._packs_weights:
            self.weights.pack()

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        """Return all logits [B, V], the same bits on every rank of the tensor axis."""
        vocabulary = self._vocabulary
        logits_BV = self.weights.logits(hidden_BD)
        if vocabulary.axis.size > 1:
            padded_BV = F.pad(logits_BV, (0, vocabulary.widest - logits_BV.shape[1]))
            parts_ABV = gather_rows(padded_BV, vocabulary.axis).unflatten(0, (vocabulary.axis.size, -1))
            logits_BV = parts_ABV.transpose(0, 1).flatten(1)[:, : vocabulary.size]
        cap = self._decoder.config.logit_softcap
        return logits_BV if cap is None else ops.softcap(logits_BV.float(), cap)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
