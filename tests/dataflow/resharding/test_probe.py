"""What the probe compares, and what it makes of the difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spmdrl.dataflow.resharding.probe import Probe, default_tolerance, exempt_share, probe_rows
from spmdrl.engines.training.packed_rows import Scores, TokenRows
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.resources.world import World
from tests.support.ranks import run_ranks

ROWS = [[5, 6, 7], [8, 9]]


class KnownTrainer:
    """Gives -1, -2, ... for the tokens it is to rate."""

    def score(self, rows: TokenRows, *, temperature: float | None = None) -> Scores:
        assert temperature == 1, "the generator's log-probs are unscaled"
        logprobs_R = -torch.arange(1.0, rows.num_response_tokens + 1)
        return Scores(logprobs_R, torch.zeros_like(logprobs_R))


@dataclass
class NearGenerator:
    """Gives the same for two rows of 3 and 2 tokens, but for the last token."""

    off_by: float
    version: int = 7

    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0 + self.off_by])]


def probed(off_by: float, tolerance: float) -> float:
    probe = Probe(KnownTrainer(), NearGenerator(off_by), lambda step: ROWS, tolerance=tolerance)
    return probe.check(probe.rate(1))


def test_the_largest_difference_within_the_tolerance_is_told():
    assert probed(-0.5, tolerance=0.5) == 0.5
    assert probed(0.0, tolerance=0.0) == 0


def test_weights_of_the_trainer_that_are_not_finite_are_named_as_that_and_not_as_moved_wrong():
    class BrokenTrainer(KnownTrainer):
        def score(self, rows: TokenRows, *, temperature: float | None = None) -> Scores:
            return Scores(super().score(rows, temperature=temperature).logprobs_R * math.nan, torch.zeros(1))

    probe = Probe(BrokenTrainer(), NearGenerator(math.nan), lambda step: ROWS, tolerance=0.5)
    with pytest.raises(RuntimeError, match=r"own log-probs aren't finite at policy version 7: .*NaN.*lower optim.lr"):
        probe.check(probe.rate(1))


@pytest.mark.parametrize("off_by", [0.75, -0.75, math.nan, -math.inf])
def test_a_larger_difference_is_refused_with_its_value_the_limit_and_the_version(off_by):
    text = "inf" if not math.isfinite(off_by) else "0.75"
    with pytest.raises(RuntimeError, match=rf"3 tokens at policy version 7 .* {text} nats.*probe_tolerance is 0.5"):
        probed(off_by, tolerance=0.5)


@dataclass
class ChangedExperts:
    """Is off by so much for some of the 8 tokens of a row of 9."""

    off_by: float
    num_off: int
    version: int = 7

    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        logprobs = -torch.arange(1.0, 9.0)
        logprobs[torch.randperm(8)[: self.num_off]] += self.off_by
        return [logprobs]


def probed_sparse(off_by: float, num_off: int) -> float:
    share = exempt_share(torch.bfloat16, has_experts=True)
    generator = ChangedExperts(off_by, num_off)
    probe = Probe(KnownTrainer(), generator, lambda step: [list(range(9))], tolerance=1.0, exempt_share=share)
    return probe.check(probe.rate(1))


def test_in_16_bits_a_quarter_of_the_tokens_may_change_experts_and_no_more():
    assert probed_sparse(3.0, num_off=2) == 3.0
    with pytest.raises(RuntimeError, match="8 tokens .* by up to 3 nats and 3 without the 2 farthest, but"):
        probed_sparse(3.0, num_off=3)
    with pytest.raises(RuntimeError, match="differ by up to inf nats, but"):
        probed_sparse(math.nan, num_off=1)
    assert exempt_share(torch.float32, has_experts=True) == exempt_share(torch.bfloat16, has_experts=False) == 0


def off_on_one_rank(world: World) -> str:
    try:
        probed(2.0 if world.rank == 1 else 0.0, tolerance=0.5)
    except RuntimeError as refusal:
        return str(refusal)
    return ""


@pytest.mark.ranks
def test_every_rank_refuses_what_one_of_them_finds():
    first, second = run_ranks(2, off_on_one_rank)
    assert first == second and "differ by up to 2 nats" in first


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1), st.integers(2, 40), st.integers(2, 9)
)
def test_probed_rows_are_heads_of_prompts_of_at_least_two_tokens(prompts, num_tokens, longest):
    endless = (prompt for round_ in repeat(prompts) for prompt in round_)
    rows = probe_rows(endless, num_tokens, longest)
    assert num_tokens - 1 <= sum(map(len, rows)) <= num_tokens
    for row, prompt in zip(rows, prompts, strict=False):
        assert 2 <= len(row) <= longest
        assert row == (prompt * 2 if len(prompt) == 1 else prompt)[: len(row)]


def test_a_run_in_float32_is_held_to_less_than_one_in_16_bits():
    assert default_tolerance(torch.float32) < default_tolerance(torch.bfloat16)


@pytest.mark.parametrize("tokens", [-1, 1])
def test_numbers_of_tokens_that_rate_nothing_are_refused(tokens):
    with pytest.raises(ValueError, match=f"reshard.probe_tokens is {tokens}, but must be >= 2"):
        ReshardConfig(probe_tokens=tokens)
