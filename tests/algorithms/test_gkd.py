"""Divergences over a teacher's likeliest tokens and the rest, against numpy in float64 over whole vocabularies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.algorithms.policy.gkd import Gkd, divergence
from spmdrl.algorithms.settings.distillation_configs import GkdConfig
from spmdrl.engines.training.heads import NOTHING
from spmdrl.nouns.batch import TokenTerms

VOCAB = 7
KINDS = ("forward", "reverse", "jsd")
SIZES = st.integers(1, VOCAB)
SEEDS = st.integers(0, 999)
BETAS = st.sampled_from([0.1, 0.5, 0.9])


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of a teacher and of a policy over the vocabulary, in three places."""
    logits = np.random.default_rng(seed).normal(size=(2, 3, VOCAB))
    teacher, policy = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return teacher, policy


def kl(of: np.ndarray, to: np.ndarray) -> np.ndarray:
    """sum of (log of - log to), weighted by `of`; of and to are probabilities."""
    return (of * (np.log(of) - np.log(to))).sum(-1)


def exact(q: np.ndarray, p: np.ndarray, kind: str, beta: float) -> np.ndarray:
    if kind == "forward":
        return kl(q, p)
    if kind == "reverse":
        return kl(p, q)
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def picked(logprobs: np.ndarray | torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    """Log-probs of some tokens, and of all others together."""
    all_RV, ids_RJ = torch.as_tensor(logprobs), torch.tensor(ids)
    rest_R1 = all_RV.scatter(1, ids_RJ, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=NOTHING)
    return torch.cat((all_RV.gather(1, ids_RJ), rest_R1), 1)


def likeliest(teacher: np.ndarray, size: int) -> np.ndarray:
    return np.argsort(-teacher, -1)[:, :size]


def in_parts(logprobs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Probabilities of some tokens, and of all others together."""
    picked_RJ = np.take_along_axis(np.exp(logprobs), ids, -1)
    rest = np.exp(logprobs)
    np.put_along_axis(rest, ids, 0.0, -1)
    return np.concatenate((picked_RJ, rest.sum(-1, keepdims=True)), -1)


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, VOCAB - 1), SEEDS, BETAS)
def test_the_loss_is_the_divergence_of_the_likeliest_tokens_and_the_rest(kind, size, seed, beta):
    teacher, policy = drawn(seed)
    ids = likeliest(teacher, size)
    config = GkdConfig(divergence=kind, top_k=size, beta=beta if kind == "jsd" else 0.5)
    columns = {"teacher_top_logprobs": picked(teacher, ids)}
    nothing_R = torch.zeros(3, dtype=torch.float64)
    terms = TokenTerms(nothing_R, nothing_R, columns, torch.zeros(3, dtype=torch.int64), 1, picked(policy, ids))
    found = Gkd(config).policy_loss(terms, nothing_R).loss_R
    np.testing.assert_allclose(
        found, exact(in_parts(teacher, ids), in_parts(policy, ids), kind, beta), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS, BETAS)
def test_more_tokens_come_nearer_to_the_whole_vocabularys_divergence_which_all_of_them_have(kind, seed, beta):
    teacher, policy = drawn(seed)
    found = []
    for size in range(1, VOCAB + 1):
        ids = likeliest(teacher, size)
        found.append(divergence(picked(teacher, ids), picked(policy, ids), kind, beta).numpy())
    whole = exact(np.exp(teacher), np.exp(policy), kind, beta)
    np.testing.assert_allclose(found[-1], whole, rtol=1e-12, atol=1e-13)
    assert all((more >= less - 1e-12).all() for less, more in zip(found[:-1], found[1:], strict=True))
    assert (np.stack(found) >= 0).all()


def test_likeliest_tokens_without_the_rest_are_no_divergence():
    q, p = np.array([0.6, 0.2, 0.2]), np.array([0.7, 0.25, 0.05])
    without = (q[:2] * (np.log(q[:2]) - np.log(p[:2]))).sum()
    assert without < 0, "although the two differ"
    assert float(divergence(*torch.tensor(np.log(np.stack((q, p)))[:, None]), "forward", 0.5)) > 0


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, VOCAB - 1), SEEDS, BETAS)
def test_gradients_are_those_of_finite_differences(kind, size, seed, beta):
    teacher, policy = drawn(seed)
    ids = likeliest(teacher, size)

    def loss(logits_RV: torch.Tensor) -> torch.Tensor:
        return divergence(picked(teacher, ids), picked(logits_RV.log_softmax(-1), ids), kind, beta)

    logits_RV = torch.tensor(policy, requires_grad=True)
    assert torch.autograd.gradcheck(loss, logits_RV, eps=1e-6, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("log_teacher", "log_policy"), [(-7, -14), (-14, -7), (-14, -16), (-28, -25)])
def test_a_small_rest_counts_in_float32_as_in_float64(kind, log_teacher, log_policy):
    """Rests from 1e-3 to 1e-12 of policy and teacher, whose other tokens have the rest of the probability."""
    rests, results = torch.tensor([[log_teacher], [log_policy]], dtype=torch.float64), []
    for dtype in (torch.float32, torch.float64):
        teacher_RJ, logits_RJ = torch.cat((torch.tensor([[0.1, 0.0], [0.0, 0.1]]), rests), 1).to(dtype)[:, None]
        found_R = divergence(teacher_RJ.log_softmax(-1), logits_RJ.requires_grad_().log_softmax(-1), kind, 0.5)
        results.append((found_R.detach(), *torch.autograd.grad(found_R.sum(), logits_RJ)))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(results[0][1][0, 2].double(), results[1][1][0, 2], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_and_certain_distributions_have_no_divergence_and_finite_gradients(kind):
    policy_RJ = torch.tensor([[0.0, -200.0, NOTHING], [-1e-9, -30.0, -25.0]], requires_grad=True)
    found_R = divergence(policy_RJ.detach(), policy_RJ, kind, 0.5)
    found_R.sum().backward()
    assert found_R.abs().max() < 1e-6 and policy_RJ.grad.isfinite().all()


def test_keys_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="algo.divergence forward has no mixture"):
        GkdConfig(divergence="forward", beta=0.2)
    with pytest.raises(ValueError, match="off_policy_bound is 0.5"):
        GkdConfig(off_policy_bound=0.5)
    assert "old_logprobs" not in Gkd(GkdConfig()).columns_for_loss(2)
    assert "old_logprobs" in Gkd(GkdConfig(rollout_is="tis")).columns_for_loss(2)
