from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdrl.engines.generation.native.sampling import RowSampling, draw, keep_likely, splitmix64, uniforms
from spmdrl.engines.models.kernels import ops, plain
from spmdrl.nouns.settings.rollout_config import SamplingParams
from tests.support.chosen_device import chosen_device

LOGITS = [2.0, 1.0, 0.5, 0.5, 0.0, -1.0, -1.5, -4.0]
NUM_DRAWS = 20_000


def rows_of(sampling: list[SamplingParams], seeds: list[int] | None = None) -> RowSampling:
    return RowSampling.of_rows(seeds or list(range(len(sampling))), sampling, chosen_device())


def reference_distribution(logits: list[float], sampling: SamplingParams) -> np.ndarray:
    """Temperature, then min-p, top-k and top-p, each on the renormalized rest, in float64."""
    probs = np.exp(np.array(logits, dtype=np.float64) / sampling.temperature)
    probs /= probs.sum()
    probs[probs < sampling.min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
    probs /= probs.sum()
    mass = 0.0
    for token in order:
        if mass >= sampling.top_p:
            probs[token] = 0
        mass += probs[token]
    return probs / probs.sum()


def test_splitmix64_gives_the_published_sequence(device):
    gamma = 0x9E3779B97F4A7C15 - (1 << 64)
    state = 1234567 + torch.arange(5, device=device) * gamma
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [value % (1 << 64) for value in splitmix64(state).tolist()] == known


def test_uniforms_depend_on_seed_and_position_and_fill_the_unit_interval(device):
    seeds, positions = torch.meshgrid(torch.arange(200, device=device), torch.arange(200, device=device), indexing="ij")
    numbers = uniforms(splitmix64(seeds.flatten()), positions.flatten())
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs((numbers**2).mean() - 1 / 3) < 0.005
    # 40,000 of 2^24 numbers: about 48 coincide by chance.
    assert numbers.unique().numel() > 40_000 - 150


@pytest.mark.on_device
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_p=0.8),
        SamplingParams(top_k=3),
        SamplingParams(top_k=1),
        SamplingParams(min_p=0.2),
        SamplingParams(top_p=0.01),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.7, min_p=0.05),
    ],
)
def test_tokens_follow_the_filtered_distribution(sampling: SamplingParams, device: torch.device):
    logits_BV = torch.tensor(LOGITS, device=device).repeat(NUM_DRAWS, 1)
    positions_B = torch.arange(NUM_DRAWS, device=device)
    drawn = draw(logits_BV, positions_B, rows_of([sampling] * NUM_DRAWS, [77] * NUM_DRAWS))
    expected = reference_distribution(LOGITS, sampling)
    counts = np.bincount(drawn.tokens_B.cpu().numpy(), minlength=len(LOGITS))
    assert not counts[expected == 0].any()
    chi_square = (((counts - NUM_DRAWS * expected) ** 2)[expected > 0] / (NUM_DRAWS * expected[expected > 0])).sum()
    # 99.99% point of chi-square with 7 degrees of freedom.
    assert chi_square < 29.9
    scaled = (torch.tensor(LOGITS) / sampling.temperature).log_softmax(-1)
    torch.testing.assert_close(drawn.logprobs_B.cpu(), scaled[drawn.tokens_B.cpu()])


@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(st.integers(-60, 60).map(lambda value: value / 10), min_size=1, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 14),
    min_p=st.floats(0, 0.9),
)
def test_filters_keep_what_the_reference_keeps(logits, temperature, top_p, top_k, min_p):
    sampling = SamplingParams(temperature, top_p, top_k, min_p)
    probs_BV = (torch.tensor([logits]) / temperature).softmax(-1)
    kept = keep_likely(probs_BV.to(chosen_device()), rows_of([sampling]))[0].cpu()
    expected = reference_distribution(logits, sampling)
    # A threshold met to within rounding may go either way.
    close = np.abs(kept.numpy() / kept.sum().item() - expected).max() < 1e-4
    assert close or threshold_is_met_exactly(probs_BV[0].double().numpy(), sampling)


def threshold_is_met_exactly(probs: np.ndarray, sampling: SamplingParams) -> bool:
    descending = np.sort(probs)[::-1]
    kept = descending[descending >= sampling.min_p * descending[0] - 1e-6][: sampling.top_k or None]
    near_top_p = np.abs(kept.cumsum() / kept.sum() - sampling.top_p).min() < 1e-5
    return bool(near_top_p or np.abs(descending - sampling.min_p * descending[0]).min() < 1e-5)


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_one(device):
    logits_BV = torch.tensor([LOGITS, LOGITS], device=device)
    drawn = draw(logits_BV, torch.tensor([3, 3], device=device), rows_of([SamplingParams(temperature=0)] * 2))
    assert drawn.tokens_B.tolist() == [0, 0]
    torch.testing.assert_close(drawn.logprobs_B.cpu(), torch.tensor(LOGITS).log_softmax(-1)[:1].expand(2))


def test_ids_without_a_token_are_never_drawn_and_log_probs_count_them_in(device):
    logits_BV = torch.tensor(LOGITS, device=device).repeat(NUM_DRAWS, 1)
    positions_B, never = torch.arange(NUM_DRAWS, device=device), torch.tensor([0, 2], device=device)
    for params in (SamplingParams(), SamplingParams(0.5, top_k=3), SamplingParams(temperature=0)):
        rows = rows_of([params] * NUM_DRAWS, [77] * NUM_DRAWS)
        drawn = draw(logits_BV, positions_B, rows, never)
        assert not {0, 2} & set(drawn.tokens_B.tolist())
        scaled = (torch.tensor(LOGITS) / (params.temperature or 1)).log_softmax(-1)
        torch.testing.assert_close(drawn.logprobs_B.cpu(), scaled[drawn.tokens_B.cpu()])
    assert logits_BV[0].tolist() == pytest.approx(LOGITS), "the logits are other rows' too"


@pytest.mark.on_device
def test_a_row_draws_the_same_beside_rows_with_other_parameters(device):
    sampling = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(0.7, top_p=0.9),
        SamplingParams(top_k=2),
    ]
    logits_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(device)
    positions_B = torch.tensor([5, 6, 7, 8], device=device)
    together = draw(logits_BV, positions_B, rows_of(sampling))
    for row in range(4):
        alone = draw(
            logits_BV[row : row + 1], positions_B[row : row + 1], rows_of([sampling[row]], [row] if row else [0])
        )
        assert alone.tokens_B[0] == together.tokens_B[row]
        assert alone.logprobs_B[0] == together.logprobs_B[row]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-24])
def test_a_token_of_weight_zero_is_never_drawn(uniform: float, device: torch.device):
    weights_BV = torch.tensor([[0.0, 0.3, 0.0, 0.1, 0.0], [0.0, 0.0, 1e-7, 0.0, 0.0]], device=device)
    tokens_B = ops.invert_cdf(weights_BV, torch.full((2,), uniform, device=device))
    assert (weights_BV.gather(1, tokens_B[:, None]) > 0).all()


def test_all_tokens_of_a_flat_distribution_are_drawn_alike(device):
    size = 1000
    rows = rows_of([SamplingParams()] * NUM_DRAWS)
    positions_B = torch.zeros(NUM_DRAWS, dtype=torch.int64, device=device)
    drawn = draw(torch.zeros(NUM_DRAWS, size, device=device), positions_B, rows)
    assert max(Counter(drawn.tokens_B.tolist()).values()) < 50
    assert drawn.tokens_B.unique().numel() > 990


def test_draws_stay_the_same_where_cumulated_sums_must_be_of_integers(monkeypatch):
    weights_BV = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).exp()
    weights_BV = torch.where(weights_BV > 1, weights_BV, 0.0) / weights_BV.amax(-1, keepdim=True)
    uniforms_B = torch.rand(64, generator=torch.Generator().manual_seed(1))
    tokens_B = ops.invert_cdf(weights_BV, uniforms_B)
    monkeypatch.setattr(plain, "FLOAT_SUMS_REFUSED", ("cpu",))
    monkeypatch.setattr(Tensor, "cumsum", _of_integers(Tensor.cumsum))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(ops.invert_cdf(weights_BV, uniforms_B), tokens_B)
        assert bool((weights_BV.gather(1, tokens_B[:, None]) > 0).all())
        weights_BV[3, 7] = float("nan")
        assert plain.cumulated(weights_BV).isnan().all(-1).nonzero().tolist() == [[3]]
    finally:
        torch.use_deterministic_algorithms(False)


def _of_integers(cumsum):
    """As CUDA's kernels are where they must be deterministic."""

    def refusing(tensor, dim):
        assert not tensor.is_floating_point(), "cumsum_cuda_kernel does not have a deterministic implementation"
        return cumsum(tensor, dim)

    return refusing
