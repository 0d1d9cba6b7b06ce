"""In every family a row of a pack is the row alone: nothing of the others reaches its logits or its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.hf.families import FAMILIES
from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.prefixed import PrefixedRows
from spmdrl.engines.models.layers import Mix, PackedCausalAttention, SharedPromptAttention
from spmdrl.nouns.batch import offsets_of
from tests.support.made import WINDOW, small_decoders

# Rows of one token, within a window and beyond it, as long as a chunk of the delta rule (64) and of no whole number.
LENGTHS = [66, 1, 7, 64, WINDOW, 130, 31, 1, WINDOW + 1, 63, 2, 47]
# The first and the last row, one in the middle, one of a single token and the longest.
CHECKED = [0, 1, 5, 6, 11]
# First pieces, and rows that follow them: prompts of one token and of more than a chunk, one without followers.
PROMPTS = [70, 1, WINDOW, 23]
FOLLOWERS = [(0, 1), (0, 67), (0, 8), (1, 5), (1, 64), (2, 12)]

SMALL = small_decoders()
every_family = pytest.mark.parametrize("family", FAMILIES)
on_a_cpu = pytest.mark.cpu_only(reason="the exact mode's operations are a CPU's")


def filled(config: DecoderConfig) -> Decoder:
    """The decoder with random weights, biases and sinks included; those of norms are about 1."""
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in decoder.state_dict().items():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator) + name.endswith("norm.weight"))
    return decoder


def drawn(num: int, config: DecoderConfig, seed: int = 1) -> Tensor:
    return torch.randint(config.vocab_size, (num,), generator=torch.Generator().manual_seed(seed))


def positions_of(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def embedded_and_logits(decoder: Decoder, tokens_T: Tensor, positions_T: Tensor, attend: Mix) -> tuple[Tensor, Tensor]:
    embedded: list[Tensor] = []
    with decoder.model.embedding.register_forward_hook(lambda module, inputs, out: embedded.append(out)):
        logits_TV = decoder(tokens_T, positions_T, attend, ops.linear)
    assert isinstance(logits_TV, Tensor)
    return embedded[0], logits_TV


def packed(decoder: Decoder, tokens_T: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    return embedded_and_logits(decoder, tokens_T, positions_of(lengths), PackedCausalAttention(offsets_of(lengths)))


def behind_prompts(decoder: Decoder, tokens_T: Tensor, rows: PrefixedRows) -> Tensor:
    """Logits of all pieces, each computed once."""
    later = [PROMPTS[prompt] + torch.arange(length) for prompt, length in FOLLOWERS]
    positions_T = torch.cat([positions_of(PROMPTS), *later])
    return embedded_and_logits(decoder, tokens_T, positions_T, SharedPromptAttention(rows))[1]


def shared_rows(config: DecoderConfig) -> tuple[PrefixedRows, Tensor]:
    prompts, lengths = zip(*FOLLOWERS, strict=True)
    return PrefixedRows(offsets_of(PROMPTS), lengths, prompts), drawn(sum(PROMPTS) + sum(lengths), config)


def pull_of(logits: Tensor) -> Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().norm())


def learnt(decoder: Decoder) -> dict[str, Tensor]:
    """Weights with a gradient: an indexer's have none."""
    return {name: weight for name, weight in decoder.named_parameters() if ".indexer." not in name}


def assert_same_gradients(decoder: Decoder, found: Sequence[Tensor], wanted: Sequence[Tensor], limit: float) -> None:
    """Equal but for rounding, weight by weight; some vanish beside others, as those of a single token's queries."""
    scale = max(float(gradient.norm()) for gradient in wanted)
    for name, one, other in zip(learnt(decoder), found, wanted, strict=True):
        assert difference(one, other) <= limit * max(float(other.norm()), 0.05 * scale), name


def check_rows_alone(config: DecoderConfig, checked: Sequence[int], limit: float) -> None:
    """Compare rows of a pack with the same rows alone: logits, and all gradients of a loss of that row."""
    decoder = filled(config)
    weights, tokens_T = list(learnt(decoder).values()), drawn(sum(LENGTHS), config)
    embedded, logits = packed(decoder, tokens_T, LENGTHS)
    places = list(pairwise(offsets_of(LENGTHS).tolist()))
    for start, stop in (places[row] for row in checked):
        own, alone = packed(decoder, tokens_T[start:stop], [stop - start])
        assert difference(logits[start:stop], alone) <= limit * float(alone.detach().norm())
        pull = pull_of(alone)
        by_embedded, *found = torch.autograd.grad(
            (logits[start:stop] * pull).sum(), [embedded, *weights], retain_graph=True
        )
        by_own, *wanted = torch.autograd.grad((alone * pull).sum(), [own, *weights])
        assert difference(by_embedded[start:stop], by_own) <= limit * float(by_own.norm())
        # Not a rounding error of the others.
        assert not by_embedded[:start].any() and not by_embedded[stop:].any()
        assert_same_gradients(decoder, found, wanted, limit)


@every_family
def test_rows_of_a_pack_have_the_logits_and_gradients_of_rows_alone(family):
    check_rows_alone(SMALL[family], (0, 6, 11), 1e-5)


@pytest.mark.slow
@on_a_cpu
@every_family
def test_in_the_exact_mode_only_sums_over_tokens_are_rounded_otherwise(exact_mode, family):
    check_rows_alone(SMALL[family], CHECKED, 2e-6)


@every_family
def test_rows_behind_shared_prompts_have_the_logits_and_gradients_of_whole_rows(family):
    decoder = filled(SMALL[family])
    rows, tokens_T = shared_rows(SMALL[family])
    whole = rows.whole_rows()
    index = torch.cat(whole)
    found = behind_prompts(decoder, tokens_T, rows)[index]
    _, wanted = packed(decoder, tokens_T[index], [len(row) for row in whole])
    assert difference(found, wanted) <= 1e-6 * float(wanted.detach().norm())
    gradients = [torch.autograd.grad((x * pull_of(x)).sum(), list(learnt(decoder).values())) for x in (found, wanted)]
    assert_same_gradients(decoder, *gradients, 1e-5)


@on_a_cpu
@every_family
def test_in_the_exact_mode_no_bit_of_a_row_depends_on_the_others(exact_mode, family):
    config = SMALL[family]
    decoder, tokens_T = filled(config).requires_grad_(False), drawn(sum(LENGTHS), config)
    logits = packed(decoder, tokens_T, LENGTHS)[1].split(LENGTHS)
    for row, (own, of_pack) in enumerate(zip(tokens_T.split(LENGTHS), logits, strict=True)):
        assert torch.equal(packed(decoder, own.clone(), [len(own)])[1], of_pack), f"row {row} of {len(own)} tokens"
    for row in CHECKED:
        others = list(drawn(sum(LENGTHS), config, seed=3).split(LENGTHS))
        others[row] = tokens_T.split(LENGTHS)[row]
        assert torch.equal(packed(decoder, torch.cat(others), LENGTHS)[1].split(LENGTHS)[row], logits[row]), row


@on_a_cpu
@every_family
def test_in_the_exact_mode_rows_behind_shared_prompts_have_the_bits_of_whole_rows(exact_mode, family):
    config = SMALL[family]
    decoder = filled(config).requires_grad_(False)
    rows, tokens_T = shared_rows(config)
    found = behind_prompts(decoder, tokens_T, rows)
    for number, row in enumerate(rows.whole_rows()):
        assert torch.equal(packed(decoder, tokens_T[row], [len(row)])[1], found[row]), f"row {number}"
