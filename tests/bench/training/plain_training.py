"""What a careful user writes in plain PyTorch around a transformers model: the training bench's comparator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.training.packed_rows import TokenRows
from spmdrl.nouns.settings.training_config import OptimConfig
from spmdrl.resources.device import Device

_NO_TARGET = -100
# Rows of a rectangle of similar ones are at least this part as long as its longest.
_SIMILAR_SHARE = 0.8


@dataclass(frozen=True)
class TokenBatch:
    """A rectangle of tokens, padded on the right."""

    tokens: Tensor
    """[rows of the rectangle, longest row]"""
    labels: Tensor
    """The next token where it is to be learned, else -100; shaped as the tokens."""
    arguments: dict[str, Tensor]
    """What shows the model where rows end."""


class PlainTrainer:
    """A transformers model, fused AdamW and clipping; float32 weights, autocast where the device computes in less."""

    def __init__(self, folder: Path, optim: OptimConfig, device: Device):
        # Imported here because it takes seconds.
        from transformers import AutoModelForCausalLM

        # transformers' choice of attention: SDPA, except where a model has only eager attention, as gpt-oss.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.to(device.torch_device).train()
        self.max_grad_norm = optim.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        is_lower = device.compute_dtype != torch.float32
        self._autocast = torch.autocast(device.kind, dtype=device.compute_dtype if is_lower else None, enabled=is_lower)

    def step(self, batches: Sequence[TokenBatch], num_targets: int) -> float:
        """Make one optimizer step over all batches, and return the mean loss."""
        total = 0.0
        for batch in batches:
            with self._autocast:
                share = loss_of_targets(self.model, batch) / num_targets
            share.backward()
            total += float(share.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def similar_batches(rows: TokenRows, max_tokens: int, device: torch.device) -> list[TokenBatch]:
    """Rows sorted by length, in rectangles of similar ones that keep, padding included, within the budget."""
    groups: list[list[int]] = []
    lengths = rows.lengths_B.tolist()
    for row in sorted(range(len(rows)), key=lambda row: -lengths[row]):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or (len(groups[-1]) + 1) * longest > max_tokens or lengths[row] < _SIMILAR_SHARE * longest:
            groups.append([])
        groups[-1].append(row)
    return [_padded(rows, group, device) for group in groups]


def _padded(rows: TokenRows, group: list[int], device: torch.device) -> TokenBatch:
    tokens, labels = zip(*(_tokens_and_labels(rows, row) for row in group), strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    lengths_B = rows.lengths_B[group]
    mask = torch.arange(int(lengths_B.max())) < lengths_B[:, None]
    return TokenBatch(
        pad(list(tokens), batch_first=True).to(device),
        pad(list(labels), batch_first=True, padding_value=_NO_TARGET).to(device),
        {"attention_mask": mask.to(torch.int64).to(device)},
    )


def _tokens_and_labels(rows: TokenRows, row: int) -> tuple[Tensor, Tensor]:
    start, stop = rows.offsets[row : row + 2].tolist()
    tokens = rows.tokens_T[start:stop]
    labels = F.pad(tokens[1:], (0, 1), value=_NO_TARGET)
    labels[: int(rows.prompt_lengths_B[row]) - 1] = _NO_TARGET
    return tokens, labels


def loss_of_targets(model: Any, batch: TokenBatch) -> Tensor:
    """The loss summed over a batch's targets, with logits only there."""
    hidden = model.model(batch.tokens, use_cache=False, **batch.arguments).last_hidden_state
    has_target = batch.labels != _NO_TARGET
    logits = model.lm_head(hidden[has_target])
    return F.cross_entropy(logits.float(), batch.labels[has_target], reduction="sum")
